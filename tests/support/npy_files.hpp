// The bytes of .npy files.
#pragma once

#include <cstddef>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace kvarn_test {

inline std::string npy(const std::string& header, const std::string& data, int major = 1) {
  std::string bytes = "\x93NUMPY";
  bytes += {static_cast<char>(major), '\0'};
  for (int i = 0; i < (major == 1 ? 2 : 4); ++i)
    bytes += static_cast<char>((header.size() >> (8 * i)) & 0xff);
  return bytes + header + data;
}

inline std::string npy_header(const std::string& descr, const std::string& shape) {
  return "{'descr': '" + descr + "', 'fortran_order': False, 'shape': " + shape + ", }   \n";
}

// A file of FP32 numbers, on a little-endian machine.
inline void write_npy(const std::filesystem::path& path, const std::vector<std::size_t>& shape,
                      const std::vector<float>& values) {
  std::string extents = "(";
  for (const std::size_t extent : shape) extents += std::to_string(extent) + ", ";
  std::string data(values.size() * sizeof(float), '\0');
  std::memcpy(data.data(), values.data(), data.size());
  std::ofstream(path, std::ios::binary) << npy(npy_header("<f4", extents + ")"), data);
}

}  // namespace kvarn_test
