# Configures, builds and runs the consumer project.
#
# MODE               installed: installs kvarn below WORK_DIR and lets find_package find it
#                    embedded: add_subdirectory of the source tree
# KVARN_SOURCE_DIR   the source tree
# KVARN_BINARY_DIR   its configured build tree
# CONSUMER_DIR       the consumer project
# WORK_DIR           where everything is written; emptied first
# GENERATOR, CXX     those of the build under test
file(REMOVE_RECURSE ${WORK_DIR})

if(MODE STREQUAL "installed")
  execute_process(
    COMMAND ${CMAKE_COMMAND} --install ${KVARN_BINARY_DIR} --prefix ${WORK_DIR}/prefix
    COMMAND_ERROR_IS_FATAL ANY)
  set(where -D CMAKE_PREFIX_PATH=${WORK_DIR}/prefix)
elseif(MODE STREQUAL "embedded")
  set(where -D KVARN_SOURCE_DIR=${KVARN_SOURCE_DIR})
else()
  message(FATAL_ERROR "MODE is '${MODE}'; allowed: installed, embedded")
endif()

execute_process(
  COMMAND ${CMAKE_COMMAND} -S ${CONSUMER_DIR} -B ${WORK_DIR}/build -G ${GENERATOR}
    -D CMAKE_CXX_COMPILER=${CXX} -D CMAKE_BUILD_TYPE=Debug ${where}
  COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${CMAKE_COMMAND} --build ${WORK_DIR}/build COMMAND_ERROR_IS_FATAL ANY)
foreach(program IN ITEMS consumer consumer_compiled)
  execute_process(COMMAND ${WORK_DIR}/build/${program} COMMAND_ERROR_IS_FATAL ANY)
endforeach()
