// The kernels of one instruction set: this file is compiled once for each, with its flags and SOFTLOOKUP_ISA as its
// name.
#include "backward.h"

namespace softlookup {
namespace SOFTLOOKUP_ISA {
namespace {

// What reads a cache, forward only.
template <class P>
constexpr Arithmetic cached_arithmetic = {
    scratch_bytes<P>, state_bytes<P>, visible_blocks, reset<P>, attend<P>, fold<P>, finish<P>,
    nullptr,          nullptr,        nullptr,        nullptr,  nullptr,   nullptr,
};

// The backward pass widens what it reads: G is the arithmetic of its sums.
template <class P, class G = P>
constexpr Arithmetic arithmetic = {
    scratch_bytes<P>,   state_bytes<P>,
    visible_blocks,     reset<P>,
    attend<P>,          fold<P>,
    finish<P>,          scores<P>,
    gradient_queries,   gradient_scratch_bytes<G>,
    query_sum_bytes<G>, start_gradients<G>,
    differentiate<G>,
};

#if SOFTLOOKUP_MATRIX_TILES
using Bfloat16 = TiledBfloat16;
using CachedBfloat16 = TiledBfloat16;
#elif SOFTLOOKUP_BFLOAT16_DOT
using Bfloat16 = PairedBfloat16;
using CachedBfloat16 = PairedBfloat16;
#else
using Bfloat16 = Plain<float>;
using CachedBfloat16 = Widened<Bfloat16Half>;
#endif
template <class P>
constexpr Cached cached = {&cached_arithmetic<P>, panel_layout<P>};

#define SOFTLOOKUP_TEXT_OF(name) #name
#define SOFTLOOKUP_TEXT(name) SOFTLOOKUP_TEXT_OF(name)

}  // namespace

// In the order of Type.
extern const Kernels kernels;
const Kernels kernels = {
    SOFTLOOKUP_TEXT(SOFTLOOKUP_ISA),
    {&arithmetic<Plain<float>>, &arithmetic<Plain<double>>, &arithmetic<Plain<float>>,
     &arithmetic<Bfloat16, Plain<float>>},
    {cached<Plain<float>>, {}, cached<Widened<Float16>>, cached<CachedBfloat16>, cached<Int8>, cached<Int4>}};

}  // namespace SOFTLOOKUP_ISA
}  // namespace softlookup
