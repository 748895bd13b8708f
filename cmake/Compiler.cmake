# Which compilers can build the core: C++20 with vector extensions, and what every unit of it is compiled with.

if(WIN32)
  message(FATAL_ERROR
    "softlookup: Windows is not supported (found ${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}). The core is "
    "written in vector extensions, which MSVC lacks and clang-cl has, and its thread pool needs POSIX threads. Build "
    "on Linux or macOS, or on Windows inside WSL.")
endif()

function(softlookup_require_compiler id minimum)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "${id}" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS "${minimum}")
    message(FATAL_ERROR
      "softlookup: found ${id} ${CMAKE_CXX_COMPILER_VERSION} at ${CMAKE_CXX_COMPILER}; the core needs ${id} ${minimum} "
      "or newer. Set CXX to a newer compiler, for example CXX=g++-12 or CXX=clang++-19.")
  endif()
endfunction()

# The oldest that the tests pass with; Clang 16 crashes on the bfloat16 kernels. AppleClang 17 is made from Clang 19.
softlookup_require_compiler(GNU 12)
softlookup_require_compiler(Clang 19)
softlookup_require_compiler(AppleClang 17)

add_library(softlookup_options INTERFACE)
target_compile_options(softlookup_options INTERFACE
  -Wall -Wextra -Wno-psabi
  # A row's bits must not depend on the compiler's choice of fused operations; NaN and infinities keep their meaning,
  # so nothing of -ffast-math but errno is given up.
  -ffp-contract=off -fno-math-errno
  # One object per instruction set: no optimiser may look across them.
  -fno-lto)

set(SOFTLOOKUP_SANITIZE "" CACHE STRING "Sanitizers to build the module with, for example address,undefined")
if(SOFTLOOKUP_SANITIZE)
  target_compile_options(softlookup_options INTERFACE
    -fsanitize=${SOFTLOOKUP_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -g -O1)
  target_link_options(softlookup_options INTERFACE -fsanitize=${SOFTLOOKUP_SANITIZE})
endif()
