# kvarn_engine_files: the file side of the engine (GGUF, dequantisation, tokenizer), and
# kvarn-tokenize. Included by examples/engine, tests and tests/fuzz, once.
include_guard(GLOBAL)
find_package(Eigen3 3.3 REQUIRED NO_MODULE)
find_path(KVARN_PCRE2_INCLUDE_DIR pcre2.h DOC "Folder of pcre2.h (Debian: libpcre2-dev)" REQUIRED)
find_library(KVARN_PCRE2_LIBRARY pcre2-8 DOC "PCRE2, 8 bits (Debian: libpcre2-dev)" REQUIRED)

add_library(kvarn_engine_files STATIC
  ${CMAKE_CURRENT_LIST_DIR}/byte_pair.cpp
  ${CMAKE_CURRENT_LIST_DIR}/dequantize.cpp
  ${CMAKE_CURRENT_LIST_DIR}/file_bytes.cpp
  ${CMAKE_CURRENT_LIST_DIR}/gguf.cpp
  ${CMAKE_CURRENT_LIST_DIR}/pre_tokenizer.cpp
  ${CMAKE_CURRENT_LIST_DIR}/tokenizer.cpp)
kvarn_warnings(kvarn_engine_files)
target_include_directories(kvarn_engine_files
  PUBLIC ${CMAKE_CURRENT_LIST_DIR}
  PRIVATE ${KVARN_PCRE2_INCLUDE_DIR})
target_link_libraries(kvarn_engine_files
  PUBLIC kvarn::kvarn Eigen3::Eigen
  PRIVATE ${KVARN_PCRE2_LIBRARY})

add_executable(kvarn-tokenize ${CMAKE_CURRENT_LIST_DIR}/tokenize.cpp)
kvarn_warnings(kvarn-tokenize)
target_link_libraries(kvarn-tokenize PRIVATE kvarn_engine_files)
