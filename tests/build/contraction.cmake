# Compiles SOURCE to assembly with -ffp-contract=off and =fast and requires as many fused
# instructions in both: then no product of the library stands where it could be fused into an
# addition. This sees what bytes.cmake may miss, because a last bit that differs seldom survives the
# rounding to a record. (The texts may differ: clang schedules a few instructions in another order.)
#
# COMPILERS     a list of commands, each with its flags after spaces
# SOURCE        the file; it uses all of the library that computes
# INCLUDE_DIR   of the library
# WORK_DIR      where assembly is written
file(MAKE_DIRECTORY ${WORK_DIR})

# A product and a sum that both settings must tell apart, or this test no longer measures.
file(WRITE ${WORK_DIR}/control.cpp "float f(float a, float b, float c) { return a * b + c; }\n")

# fused_count(OUT COMMAND SOURCE CONTRACT): how many multiply-adds the assembly has, of x86-64 or
# AArch64.
function(fused_count out command source contract)
  set(file ${WORK_DIR}/${contract}.s)
  execute_process(
    COMMAND ${command} -std=c++20 -O2 -I ${INCLUDE_DIR} -ffp-contract=${contract} -S ${source}
      -o ${file}
    COMMAND_ERROR_IS_FATAL ANY)
  file(STRINGS ${file} fused REGEX "^\t(vfn?m(add|sub)|fn?m(add|sub|la|ls))")
  list(LENGTH fused count)
  set(${out} ${count} PARENT_SCOPE)
endfunction()

if(COMPILERS STREQUAL "")
  message(FATAL_ERROR "no compiler to test with")
endif()
foreach(compiler IN LISTS COMPILERS)
  separate_arguments(command UNIX_COMMAND ${compiler})
  fused_count(off "${command}" ${WORK_DIR}/control.cpp off)
  fused_count(fast "${command}" ${WORK_DIR}/control.cpp fast)
  if(NOT off EQUAL 0 OR NOT fast EQUAL 1)
    message(FATAL_ERROR "${compiler} fuses ${off} and ${fast} products of control.cpp, not 0 and 1")
  endif()
  fused_count(off "${command}" ${SOURCE} off)
  fused_count(fast "${command}" ${SOURCE} fast)
  if(off EQUAL 0 OR NOT off EQUAL fast)
    message(FATAL_ERROR "${compiler} has ${off} multiply-adds, and ${fast} where it may fuse; "
      "compare off.s and fast.s in ${WORK_DIR}")
  endif()
  message("${compiler}: ${off} multiply-adds, none but those that are written")
endforeach()
