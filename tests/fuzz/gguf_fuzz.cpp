// libFuzzer on the reader of GGUF files: what is read must lie inside of the file, and every
// lookup, tensor and tokenizer of it works or says why not. -max_len=4096 is long enough.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

#include "../examples/engine/dequantize.hpp"
#include "../examples/engine/gguf.hpp"
#include "../examples/engine/tokenizer.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t*, std::size_t);

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::vector<std::byte> bytes(size);
  if (size > 0) std::memcpy(bytes.data(), data, size);
  const auto opened = kvarn_engine::gguf_file::from_bytes(std::move(bytes));
  if (!opened.ok()) return 0;
  const auto& file = opened.value();
  std::size_t total = 0;
  for (const auto& tensor : file.tensors()) {
    total += tensor.bytes.size();
    const auto matrix = kvarn_engine::dequantize(tensor);
    if (matrix.ok() && matrix.value().size() == 0) std::abort();
  }
  if (total > size) std::abort();
  for (const std::string_view key : {"a", "general.alignment", "tokenizer.ggml.tokens"}) {
    (void)file.find<bool>(key);
    (void)file.find<int>(key);
    (void)file.find<double>(key);
    (void)file.find<std::string_view>(key);
    (void)file.find<std::vector<std::uint8_t>>(key);
    (void)file.find<std::vector<float>>(key);
    (void)file.find<std::vector<std::string_view>>(key);
  }
  const auto tokenizer = kvarn_engine::tokenizer::from_gguf(file);
  if (tokenizer.ok()) (void)tokenizer.value().encode("ab <s>\xff", true);
  return 0;
}
