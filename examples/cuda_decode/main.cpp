// Decode steps of all layers of a model under one CUDA graph: append and attend, with the sealing
// of full groups in front of a step, or beside steps on a stream of its own. Prints microseconds
// per step, and what reading the same tokens as FP16 would take at the speed of a copy.
#include <cuda_runtime_api.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.hpp"
#include "kvarn/cuda/device_cache.hpp"

namespace {

namespace cuda = kvarn::cuda;
using cuda_decode::format;

constexpr int kv_heads = 8;
constexpr int query_heads = 32;
constexpr int row = kv_heads * 128;  // elements of the keys, or values, of a token
constexpr int chunk = 2048;          // tokens of a prompt at a time

void check(cudaError_t code) {
  if (code != cudaSuccess) throw std::runtime_error(cudaGetErrorString(code));
}
void check(const cuda::launch_status& launched) {
  if (!launched.ok()) throw std::runtime_error(launched.message);
}

class device_memory {
 public:
  explicit device_memory(std::size_t bytes) : bytes_(bytes) {
    check(cudaMalloc(&data_, std::max<std::size_t>(bytes, 16)));
  }
  device_memory(const device_memory&) = delete;
  device_memory& operator=(const device_memory&) = delete;
  ~device_memory() { cudaFree(data_); }
  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  std::size_t bytes_;
};

enum class sealing { none, in_front, beside };

class decoder {
 public:
  // `steps`: of one run.
  decoder(int layers, int batch, int context, int steps)
      : layers_(layers),
        batch_(batch),
        context_(context),
        cache_(make_cache(layers, batch, context, steps)),
        keys_(std::size_t{2} * row * static_cast<std::size_t>(std::max(batch, chunk))),
        queries_(std::size_t{2} * query_heads * 128 *
                 static_cast<std::size_t>(std::max(batch, chunk))),
        out_(queries_.bytes()),
        tensors_{queries_.data(), out_.data(), nullptr},
        step_(cuda::device_batch::make(layers, {.sequences = batch,
                                                .pages = pages_of(context, steps),
                                                .tail = 3 * format.group + steps})
                  .value()),
        workspace_(attention_workspace()) {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    check(cudaStreamCreateWithFlags(&beside_, cudaStreamNonBlocking));
    cuda_decode::fill(keys_.data(), keys_.bytes() / 2, 1, stream_);
    cuda_decode::fill(queries_.data(), queries_.bytes() / 2, 2, stream_);
    read_prompts();
    capture();
  }
  decoder(const decoder&) = delete;
  decoder& operator=(const decoder&) = delete;
  ~decoder() {
    cudaDeviceSynchronize();
    if (graph_ != nullptr) cudaGraphExecDestroy(graph_);
    cudaStreamDestroy(stream_);
    cudaStreamDestroy(beside_);
  }

  struct timing {
    double average;  // microseconds of a step
    double worst;
    int sealed;
  };

  timing run(int steps, sealing how) {
    const std::vector<int> tokens(ids_.size(), 1);
    std::vector<cudaEvent_t> events(static_cast<std::size_t>(steps) + 1);
    for (cudaEvent_t& event : events) check(cudaEventCreate(&event));
    timing t{0, 0, 0};
    check(cudaEventRecord(events[0], stream_));
    for (int i = 0; i < steps; ++i) {
      cache_.begin(step_, ids_, tokens, std::span(&tensors_, 1), stream_).or_throw();
      check(cudaGraphLaunch(graph_, stream_));
      for (const auto id : ids_) cache_.commit(id).or_throw();
      if (how == sealing::in_front) t.sealed += cache_.seal(ids_, 1, stream_).value();
      if (how == sealing::beside && cache_.is_sealed()) {
        cache_.finish_seal(stream_).or_throw();
        t.sealed += cache_.begin_seal(ids_, 1, stream_, beside_).value();
      }
      check(cudaEventRecord(events[static_cast<std::size_t>(i) + 1], stream_));
    }
    cache_.finish_seal(stream_).or_throw();
    check(cudaDeviceSynchronize());
    for (std::size_t i = 0; i + 1 < events.size(); ++i) {
      float milliseconds = 0;
      check(cudaEventElapsedTime(&milliseconds, events[i], events[i + 1]));
      t.average += 1e3 * static_cast<double>(milliseconds) / steps;
      t.worst = std::max(t.worst, 1e3 * static_cast<double>(milliseconds));
    }
    for (cudaEvent_t event : events) check(cudaEventDestroy(event));
    return t;
  }

  // Bytes of the tokens that a step reads, packed and as FP16.
  double packed_bytes() const { return tokens() * cache_.sealed_token_bytes(); }
  double half_bytes() const { return tokens() * 2.0 * 2 * row * layers_; }
  std::size_t page_bytes() const { return cache_.memory().pages; }

 private:
  // Of one sequence, with `steps` steps in each of at most four runs.
  static int pages_of(int context, int steps) { return (context + 4 * steps) / format.group + 2; }

  static cuda::device_cache<> make_cache(int layers, int batch, int context, int steps) {
    kvarn::cache_config config{
        .layers = layers, .kv_heads = kv_heads, .query_heads = query_heads, .format = format};
    config.sink = 0;
    config.max_sequences = batch;
    config.page_count = std::int64_t{batch} * pages_of(context, steps);
    // Tails of the batch, and a chunk of a prompt more, twice over for growth.
    config.exact_memory =
        std::size_t{4} * row * static_cast<std::size_t>(layers) *
        (static_cast<std::size_t>(batch) * static_cast<std::size_t>(4 * format.group + 8 * steps) +
         std::size_t{2} * (chunk + 512));
    return cuda::device_cache<>::make(config, cuda_decode::cache_launchers(), nullptr,
                                      {.seal_tiles = std::max(batch, chunk / format.group)})
        .value();
  }

  double tokens() const { return static_cast<double>(batch_) * context_; }

  device_memory attention_workspace() const {
    return device_memory(cuda_decode::attention_workspace_bytes(arguments(0)));
  }
  cuda::attention_arguments arguments(int layer) const {
    cuda::attention_arguments a = cache_.attention(step_, layer);
    a.softmax_scale = static_cast<float>(1 / std::sqrt(128.0));
    return a;
  }

  void append(const cuda::device_batch& batch) {
    for (int layer = 0; layer < layers_; ++layer)
      cache_
          .append(batch, layer, keys_.data(), keys_.data(), cuda::element_type::float16,
                  {row, 128, 1}, {row, 128, 1}, stream_)
          .or_throw();
  }

  // Sequences of different lengths, so that they are full at different steps.
  void read_prompts() {
    auto prompt = cuda::device_batch::make(layers_, {.tokens = chunk,
                                                     .pages = pages_of(context_, 0),
                                                     .tail = chunk + format.group})
                      .value();
    for (int i = 0; i < batch_; ++i) {
      const auto id = cache_.create().value();
      ids_.push_back(id);
      int left = context_ + i * format.group / batch_;
      while (left > 0) {
        const int tokens = std::min(left, chunk);
        cache_
            .begin(prompt, std::span(&id, 1), std::span(&tokens, 1), std::span(&tensors_, 1),
                   stream_)
            .or_throw();
        append(prompt);
        cache_.commit(id).or_throw();
        (void)cache_.seal(std::span(&id, 1), chunk / format.group, stream_).value();
        left -= tokens;
      }
    }
    check(cudaStreamSynchronize(stream_));
  }

  void capture() {
    cudaGraph_t graph = nullptr;
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    for (int layer = 0; layer < layers_; ++layer) {
      cache_
          .append(step_, layer, keys_.data(), keys_.data(), cuda::element_type::float16,
                  {row, 128, 1}, {row, 128, 1}, stream_)
          .or_throw();
      cuda::attention_arguments a = arguments(layer);
      a.workspace = workspace_.data();
      check(cuda_decode::attend(a, stream_));
    }
    check(cudaStreamEndCapture(stream_, &graph));
    check(cudaGraphInstantiate(&graph_, graph, 0));
    check(cudaGraphDestroy(graph));
  }

  int layers_;
  int batch_;
  int context_;
  cuda::device_cache<> cache_;
  device_memory keys_;  // and values
  device_memory queries_;
  device_memory out_;
  cuda::batch_tensors tensors_;
  cuda::device_batch step_;
  device_memory workspace_;
  cudaStream_t stream_ = nullptr;
  cudaStream_t beside_ = nullptr;
  cudaGraphExec_t graph_ = nullptr;
  std::vector<kvarn::sequence_id> ids_;
};

// Bytes per microsecond that a copy reads and writes.
double copy_speed() {
  constexpr std::size_t bytes = std::size_t{1} << 30;
  const device_memory from(bytes);
  const device_memory to(bytes);
  cudaEvent_t start = nullptr;
  cudaEvent_t stop = nullptr;
  check(cudaEventCreate(&start));
  check(cudaEventCreate(&stop));
  float best = 1e9f;
  for (int i = 0; i < 5; ++i) {
    float milliseconds = 0;
    check(cudaEventRecord(start));
    check(cudaMemcpyAsync(to.data(), from.data(), bytes, cudaMemcpyDeviceToDevice));
    check(cudaEventRecord(stop));
    check(cudaEventSynchronize(stop));
    check(cudaEventElapsedTime(&milliseconds, start, stop));
    best = std::min(best, milliseconds);
  }
  check(cudaEventDestroy(start));
  check(cudaEventDestroy(stop));
  return 2.0 * static_cast<double>(bytes) / (1e3 * static_cast<double>(best));
}

}  // namespace

int main(int argc, char** argv) try {
  int layers = 32;
  int batch = 32;
  int context = 32768;
  int steps = 256;
  CLI::App app{"Decode steps with packed keys and values on a GPU"};
  app.add_option("--layers", layers, "layers of the model")->check(CLI::Range(1, 200));
  app.add_option("--batch", batch, "sequences")->check(CLI::Range(1, 1024));
  app.add_option("--context", context, "tokens of a sequence")->check(CLI::Range(1, 1 << 20));
  app.add_option("--steps", steps, "steps that are timed")->check(CLI::Range(1, 4096));
  CLI11_PARSE(app, argc, argv);

  const double speed = copy_speed();
  decoder model(layers, batch, context, steps);
  std::printf("%d layers, %d sequences of %d tokens, %d query and %d KV heads of 128; K2V2\n",
              layers, batch, context, query_heads, kv_heads);
  std::printf("%-34s %9s %9s %7s\n", "microseconds per step", "average", "longest", "tiles");
  model.run(std::max(8, steps / 8), sealing::beside);
  const auto print = [&](const char* name, sealing how) {
    const auto t = model.run(steps, how);
    std::printf("%-34s %9.1f %9.1f %7d\n", name, t.average, t.worst, t.sealed);
  };
  print("sealed beside steps", sealing::beside);
  print("sealed between steps", sealing::in_front);
  print("not sealed", sealing::none);
  std::printf("a copy of the packed bytes (%.2f GB)  %9.1f\n", model.packed_bytes() * 1e-9,
              model.packed_bytes() / speed);
  std::printf("a copy of them as FP16 (%.2f GB)    %9.1f\n", model.half_bytes() * 1e-9,
              model.half_bytes() / speed);
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
