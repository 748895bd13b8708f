# The instruction sets: core/isa.cpp and core/limits.cpp are compiled once for each, into objects of its own.
# docs/instruction-sets.md says what they must keep to. Sets the list SOFTLOOKUP_ISA_OBJECTS, and SOFTLOOKUP_BASELINE, the
# flags of all other code.

include(CheckCXXSourceCompiles)
check_cxx_source_compiles("#ifndef __x86_64__\n#error\n#endif\nint main() {}" SOFTLOOKUP_TARGET_X86)
check_cxx_source_compiles("#ifndef __aarch64__\n#error\n#endif\nint main() {}" SOFTLOOKUP_TARGET_ARM64)

set(SOFTLOOKUP_ISA_OBJECTS "")
function(softlookup_instruction_set name)
  set(target softlookup_isa_${name})
  add_library(${target} OBJECT core/isa.cpp core/limits.cpp)
  target_compile_definitions(${target} PRIVATE SOFTLOOKUP_ISA=${name})
  # A kernel throws nothing; without this its clean-up code would share a symbol between the sets.
  target_compile_options(${target} PRIVATE ${ARGN} -fno-exceptions
    # GCC 12 takes the lanes of vectors that loops fill for uninitialised.
    $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
  target_link_libraries(${target} PRIVATE softlookup_options)
  set(SOFTLOOKUP_ISA_OBJECTS ${SOFTLOOKUP_ISA_OBJECTS} $<TARGET_OBJECTS:${target}> PARENT_SCOPE)
endfunction()

if(SOFTLOOKUP_TARGET_X86)
  set(SOFTLOOKUP_BASELINE -march=x86-64)
  softlookup_instruction_set(x86_64 -march=x86-64)
  softlookup_instruction_set(x86_64_v3 -march=x86-64-v3)
  softlookup_instruction_set(x86_64_v4 -march=x86-64-v4 -mprefer-vector-width=512)
  set(SOFTLOOKUP_V4_BF16 -march=x86-64-v4 -mavx512bf16 -mavx512vnni -mprefer-vector-width=512)
  softlookup_instruction_set(x86_64_v4_bf16 ${SOFTLOOKUP_V4_BF16})
  # Tiles must be asked for, and how is known of Linux only; an assembler may be too old for their instructions.
  if(CMAKE_SYSTEM_NAME STREQUAL "Linux")
    set(CMAKE_REQUIRED_FLAGS "-mamx-tile -mamx-bf16")
    check_cxx_source_compiles("int main() { asm volatile(\"tdpbf16ps %tmm2, %tmm1, %tmm0\"); }" SOFTLOOKUP_AMX)
    unset(CMAKE_REQUIRED_FLAGS)
  endif()
  if(SOFTLOOKUP_AMX)
    softlookup_instruction_set(x86_64_v4_amx ${SOFTLOOKUP_V4_BF16} -mamx-tile -mamx-bf16)
  endif()
elseif(SOFTLOOKUP_TARGET_ARM64)
  set(SOFTLOOKUP_BASELINE -march=armv8-a)
  softlookup_instruction_set(arm64 -march=armv8-a)
else()
  message(FATAL_ERROR
    "softlookup: ${CMAKE_CXX_COMPILER} compiles for ${CMAKE_SYSTEM_PROCESSOR} (CMAKE_OSX_ARCHITECTURES: "
    "'${CMAKE_OSX_ARCHITECTURES}'); the core has kernels for x86-64 and arm64, one of them in one build.")
endif()
