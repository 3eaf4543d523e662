# kvarn_add_compiled(INCLUDE_DIR): the target kvarn::compiled, which is kvarn::kvarn with the kernels
# in a static library, so that no file that links it compiles them. Not built unless it is linked.
# The package and the source tree both define it here, for the compiler and flags of who uses it.
function(kvarn_add_compiled include_dir)
  if(TARGET kvarn_compiled)
    return()
  endif()
  add_library(kvarn_compiled STATIC EXCLUDE_FROM_ALL ${include_dir}/kvarn/compiled_kernels.cpp)
  target_compile_definitions(kvarn_compiled PUBLIC KVARN_COMPILED_KERNELS)
  target_link_libraries(kvarn_compiled PUBLIC kvarn::kvarn)
  # For users that are shared libraries.
  set_target_properties(kvarn_compiled PROPERTIES POSITION_INDEPENDENT_CODE ON)
  add_library(kvarn::compiled ALIAS kvarn_compiled)
endfunction()
