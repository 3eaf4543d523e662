# kvarn_warnings(TARGET [AS_ERRORS]): the warnings that every program of this project is built with.
# KVARN_WARNINGS_AS_ERRORS makes them errors everywhere, AS_ERRORS for this target.
function(kvarn_warnings target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "AS_ERRORS" "" "")
  set(flags -Wall -Wextra -Wconversion -Wpedantic)
  if(arg_AS_ERRORS OR KVARN_WARNINGS_AS_ERRORS)
    list(APPEND flags -Werror)
  endif()
  # nvcc's own host code is not pedantic, so C++ files only.
  target_compile_options(${target} PRIVATE
    "$<$<COMPILE_LANG_AND_ID:CXX,GNU,Clang,AppleClang>:${flags}>")
endfunction()
