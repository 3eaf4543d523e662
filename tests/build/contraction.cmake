# Compiles SOURCE to assembly with -ffp-contract=off and =fast and requires that both are equal: then
# no product of the library stands where it could be fused into an addition. This sees what
# bytes.cmake may miss, because a last bit that differs seldom survives the rounding to a record.
#
# COMPILERS     a list of commands, each with its flags after spaces
# SOURCE        the file; it uses all of the library that computes
# INCLUDE_DIR   of the library
# WORK_DIR      where assembly is written
file(MAKE_DIRECTORY ${WORK_DIR})

# A product and a sum that both settings must tell apart, or this test no longer measures.
file(WRITE ${WORK_DIR}/control.cpp "float f(float a, float b, float c) { return a * b + c; }\n")

# assembly(OUT COMMAND SOURCE CONTRACT)
function(assembly out command source contract)
  set(file ${WORK_DIR}/${contract}.s)
  execute_process(
    COMMAND ${command} -std=c++20 -O2 -I ${INCLUDE_DIR} -ffp-contract=${contract} -S ${source}
      -o ${file}
    COMMAND_ERROR_IS_FATAL ANY)
  file(READ ${file} text)
  set(${out} "${text}" PARENT_SCOPE)
endfunction()

if(COMPILERS STREQUAL "")
  message(FATAL_ERROR "no compiler to test with")
endif()
foreach(compiler IN LISTS COMPILERS)
  separate_arguments(command UNIX_COMMAND ${compiler})
  foreach(source IN ITEMS ${WORK_DIR}/control.cpp ${SOURCE})
    assembly(off "${command}" ${source} off)
    assembly(fast "${command}" ${source} fast)
    if(source STREQUAL SOURCE AND NOT off STREQUAL fast)
      message(FATAL_ERROR "${compiler} fuses a product and an addition; compare off.s and fast.s in "
        "${WORK_DIR}")
    elseif(NOT source STREQUAL SOURCE AND off STREQUAL fast)
      message(FATAL_ERROR "${compiler} does not fuse a product and an addition of control.cpp")
    endif()
  endforeach()
  message("${compiler}: nothing to fuse")
endforeach()
