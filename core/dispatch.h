// Which instruction sets this build has, which of them this CPU can run, and which one is used.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace softlookup {

std::vector<const Kernels*> compiled_kernels();
std::vector<const Kernels*> usable_kernels();  // best last

// The kernels of that name; an empty name means the default: SOFTLOOKUP_ISA, else the best. Throws
// std::invalid_argument, listing what is usable.
const Kernels& kernels_named(const std::string& name);

}  // namespace softlookup
