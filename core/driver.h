// Cuts a problem into items and runs them on the threads.
#pragma once

#include "kernels.h"

namespace softlookup {

// All throw std::bad_alloc; what a predicate raised is found in its own context.
void attend(const Problem& problem, const Arithmetic& arithmetic, int threads);
void scores(const Problem& problem, const Arithmetic& arithmetic, int threads);

// Fills what `gradients` asks for; its query_sums, turns and wait are set here.
void differentiate(const Problem& problem, Gradients gradients, const Arithmetic& arithmetic, int threads);

}  // namespace softlookup
