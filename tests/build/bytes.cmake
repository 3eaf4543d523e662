# Runs the programs in PROGRAMS (a list) and requires that all print the same. A program that ends
# with code 77 needs another processor: it is reported and left out.
set(expected "")
set(expected_from "")
set(differing "")
foreach(program IN LISTS PROGRAMS)
  cmake_path(GET program FILENAME name)
  execute_process(
    COMMAND ${program}
    RESULT_VARIABLE result
    OUTPUT_VARIABLE output
    ERROR_VARIABLE errors)
  if(result EQUAL 77)
    message("${name}: left out, this processor cannot run it")
    continue()
  endif()
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${name} ended with ${result}\n${output}${errors}")
  endif()

  string(SHA256 digest "${output}")
  message("${name}: ${digest}")
  if(expected_from STREQUAL "")
    set(expected_from ${name})
    set(expected "${output}")
  elseif(NOT output STREQUAL expected)
    message("${name} prints:\n${output}")
    list(APPEND differing ${name})
  endif()
endforeach()

if(differing)
  message("${expected_from} prints:\n${expected}")
  message(FATAL_ERROR "these print other bytes than ${expected_from}: ${differing}")
endif()
if(expected STREQUAL "")
  message(FATAL_ERROR "no program printed anything")
endif()
