# Install rules: the headers, the package files for find_package(kvarn), the licence.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(kvarn_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/kvarn)

install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})

install(TARGETS kvarn EXPORT kvarn_targets INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT kvarn_targets
  FILE kvarnTargets.cmake
  NAMESPACE kvarn::
  DESTINATION ${kvarn_package_dir})

configure_package_config_file(
  ${PROJECT_SOURCE_DIR}/cmake/kvarnConfig.cmake.in
  ${PROJECT_BINARY_DIR}/kvarnConfig.cmake
  INSTALL_DESTINATION ${kvarn_package_dir}
  PATH_VARS CMAKE_INSTALL_INCLUDEDIR
  NO_SET_AND_CHECK_MACRO)
# Before 1.0 a new minor version may break its users.
write_basic_package_version_file(
  ${PROJECT_BINARY_DIR}/kvarnConfigVersion.cmake
  COMPATIBILITY SameMinorVersion
  ARCH_INDEPENDENT)
install(
  FILES
    ${PROJECT_BINARY_DIR}/kvarnConfig.cmake
    ${PROJECT_BINARY_DIR}/kvarnConfigVersion.cmake
    ${CMAKE_CURRENT_LIST_DIR}/kvarn_compiled.cmake
  DESTINATION ${kvarn_package_dir})
