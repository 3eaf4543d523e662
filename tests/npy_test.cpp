// The reader of .npy files: what numpy writes, and files that are not what they claim.
#include "../examples/common/npy.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/npy_files.hpp"

namespace {

using kvarn_test::npy;

// A file in the temporary directory that is gone after the test.
class temporary_file {
 public:
  explicit temporary_file(const std::string& bytes)
      : path_(testing::TempDir() + "kvarn_npy_" +
              testing::UnitTest::GetInstance()->current_test_info()->name() + ".npy") {
    std::ofstream(path_, std::ios::binary) << bytes;
  }
  ~temporary_file() { std::remove(path_.c_str()); }
  temporary_file(const temporary_file&) = delete;
  temporary_file& operator=(const temporary_file&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

const std::string ones_f4("\x00\x00\x80\x3f\x00\x00\x80\x3f", 8);  // 1, 1

kvarn_examples::npy_array read(const std::string& bytes) {
  return kvarn_examples::read_npy(temporary_file(bytes).path());
}

// The error of a file, which must name the file.
std::string refusal(const std::string& bytes) {
  const temporary_file file(bytes);
  try {
    kvarn_examples::read_npy(file.path());
  } catch (const std::runtime_error& e) {
    const std::string message = e.what();
    EXPECT_EQ(message.rfind(file.path() + ": ", 0), 0u) << message;
    return message.substr((std::min)(message.size(), file.path().size() + 2));
  }
  return "read";
}

using shape = std::vector<std::size_t>;

TEST(Npy, Float32) {
  const std::string data("\x00\x00\x80\x3f\x00\x00\x00\xc0", 8);
  const auto array = read(npy(kvarn_test::npy_header("<f4", "(2,)"), data));
  EXPECT_EQ(array.shape, shape{2});
  EXPECT_EQ(array.values, (std::vector<float>{1, -2}));
}

TEST(Npy, Float16InFormat2) {
  // 1, -2, 65504, 2^-24, 0, 0.333...
  const std::string data("\x00\x3c\x00\xc0\xff\x7b\x01\x00\x00\x00\x55\x35", 12);
  const auto array = read(npy(kvarn_test::npy_header("<f2", "(1, 2, 1, 3)"), data, 2));
  EXPECT_EQ(array.shape, (shape{1, 2, 1, 3}));
  EXPECT_EQ(array.values, (std::vector<float>{1, -2, 65504, 0x1p-24f, 0, 0x1.554p-2f}));
}

TEST(Npy, KeysInAnyOrderAndEitherQuotes) {
  const auto array = read(npy("{\"shape\":(1,2),'fortran_order':False,'descr':\"<f4\"}", ones_f4));
  EXPECT_EQ(array.shape, (shape{1, 2}));
}

TEST(Npy, RefusesOtherFiles) {
  EXPECT_EQ(refusal(""), "ends within the npy signature: 8 bytes expected, 0 left");
  EXPECT_NE(refusal("\x93NUM").find("ends within the npy signature"), std::string::npos);
  EXPECT_NE(refusal("PK\x03\x04 a zip file").find("does not start with"), std::string::npos);
  EXPECT_NE(refusal(npy(kvarn_test::npy_header("<f4", "(2,)"), ones_f4, 3)).find("format is 3.0"),
            std::string::npos);
  EXPECT_THROW(kvarn_examples::read_npy(testing::TempDir() + "no such file"), std::runtime_error);
  EXPECT_THROW(kvarn_examples::read_npy(testing::TempDir()), std::runtime_error);
}

TEST(Npy, RefusesOtherTypesAndOrders) {
  for (const std::string descr : {"<f8", ">f4", ">f2", "<i4", "|u1", "f4", ""})
    EXPECT_NE(refusal(npy(kvarn_test::npy_header(descr, "(2,)"), ones_f4))
                  .find("descr is '" + descr + "'"),
              std::string::npos);
  EXPECT_NE(refusal(npy("{'descr': '<f4', 'fortran_order': True, 'shape': (2,), }", ones_f4))
                .find("fortran_order is True"),
            std::string::npos);
}

TEST(Npy, RefusesEveryTruncation) {
  const std::string whole = npy(kvarn_test::npy_header("<f4", "(2,)"), ones_f4);
  EXPECT_EQ(refusal(whole), "read");
  for (std::size_t size = 0; size < whole.size(); ++size)
    EXPECT_NE(refusal(whole.substr(0, size)), "read") << size;
  EXPECT_NE(refusal(whole + "x").find("shape needs 8 bytes of data; the file has 9"),
            std::string::npos);
}

TEST(Npy, RefusesHostileSizes) {
  const auto of_shape = [&](const std::string& text) {
    return refusal(npy(kvarn_test::npy_header("<f4", text), ones_f4));
  };
  EXPECT_NE(of_shape("(4294967296, 4294967296)").find("extent 4294967296 needs more"),
            std::string::npos);
  EXPECT_NE(of_shape("(2, 9223372036854775809)").find("needs more"), std::string::npos);
  EXPECT_NE(of_shape("(99999999999999999999,)").find("must be whole numbers"), std::string::npos);
  EXPECT_NE(of_shape("(3,)").find("needs more"), std::string::npos);
  EXPECT_NE(of_shape("(1,)").find("shape needs 4 bytes"), std::string::npos);
  EXPECT_NE(of_shape("(0, 2)").find("extent of 0"), std::string::npos);
  EXPECT_NE(of_shape("(-2,)").find("'-2,)"), std::string::npos);
  EXPECT_NE(of_shape("()").find("no dimension"), std::string::npos);
  EXPECT_NE(of_shape("(1, 1, 1, 1, 2)").find("more than 4"), std::string::npos);

  // Header lengths beyond the file: 65535 and 4294967295.
  EXPECT_NE(refusal(std::string("\x93NUMPY\x01\x00\xff\xff{", 11)).find("length is 65535"),
            std::string::npos);
  EXPECT_NE(refusal(std::string("\x93NUMPY\x02\x00\xff\xff\xff\xff{", 13)).find("4294967295"),
            std::string::npos);
}

TEST(Npy, RefusesMalformedHeaders) {
  for (const std::string text :
       {"", "{", "{}", "()", "{'descr'}", "{'descr': '<f4'", "{'descr': '<f4}",
        "{'descr': '<f4', 'fortran_order': False}", "{'descr': '<f4', 'shape': (2,)}",
        "{'fortran_order': False, 'shape': (2,)}",
        "{'descr': '<f4', 'fortran_order': 0, 'shape': (2,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': 2}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2 1)}",
        "{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (2,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), 'more': 1}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2,)} x",
        "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (2,)}"})
    EXPECT_EQ(refusal(npy(text, ones_f4)).rfind("npy header: ", 0), 0u) << text;
}

}  // namespace
