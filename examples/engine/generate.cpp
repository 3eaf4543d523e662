// kvarn-generate: text from a language model with its KV cache in 2 to 4 bits, or exact.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <iostream>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cache_memory.hpp"
#include "file_bytes.hpp"
#include "generation.hpp"
#include "gguf.hpp"
#include "model_file.hpp"
#include "sampler.hpp"
#include "tokenizer.hpp"
#include "transformer.hpp"

namespace {

using kvarn_engine::model_config;

struct arguments {
  std::string model;
  std::string prompt;
  bool chat = false;
  std::string system;
  std::string cache = "tuned";
  std::string bits = "k2v2";
  int sink = 128;
  int tail = 0;
  int group = 128;
  bool int8 = false;
  int most = 200;
  int chunk = 128;
  int threads = 2;
  kvarn_engine::sampler_settings sampling;
  std::string benchmark_text;
  int context = 4096;
};

void add_options(CLI::App& app, arguments& a) {
  app.add_option("--model", a.model, "GGUF file")->required();
  auto* prompt = app.add_option("--prompt", a.prompt, "Text to go on from");
  auto* chat =
      app.add_flag("--chat", a.chat, "Ask the prompt as a question, in the ChatML template");
  app.add_option("--system", a.system, "System message of the chat")->needs(chat);
  app.add_option("--cache", a.cache,
                 "How tokens are stored; these are known: " + kvarn_engine::cache_names() +
                     "; exact is FP16")
      ->capture_default_str();
  app.add_option("--bits", a.bits, "Bits of keys and values: kXvY")->capture_default_str();
  app.add_option("--sink", a.sink, "First tokens that stay exact")->capture_default_str();
  app.add_option("--tail", a.tail, "Last tokens that stay exact, at least")->capture_default_str();
  app.add_option("--group", a.group, "Tokens of a packed group: 64 or 128")->capture_default_str();
  app.add_flag("--int8", a.int8, "Attention with operands in one int8 part: faster, less exact");
  app.add_option("-n,--tokens", a.most, "Most tokens to generate; decoded ones of the benchmark")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app.add_option("--chunk", a.chunk, "Tokens of the prompt that go through the model at once")
      ->check(CLI::Range(1, 1 << 16))
      ->capture_default_str();
  app.add_option("--threads", a.threads, "Threads")
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
  app.add_option("--temperature", a.sampling.temperature, "0: the most likely token always")
      ->capture_default_str();
  app.add_option("--top-k", a.sampling.top_k, "Draw from the k most likely tokens; 0: from all")
      ->capture_default_str();
  app.add_option("--top-p", a.sampling.top_p, "Draw from the likeliest tokens that reach p")
      ->capture_default_str();
  app.add_option("--seed", a.sampling.seed, "Of the draws")->capture_default_str();
  app.add_option("--benchmark", a.benchmark_text,
                 "Instead of generating, feed this text to the chosen cache and to the exact one, "
                 "and compare the time of decoding its next tokens")
      ->excludes(prompt);
  app.add_option("--context", a.context, "Tokens of text before the benchmark")
      ->check(CLI::Range(1, 1 << 24))
      ->capture_default_str();
}

double fp16_bytes(const model_config& c, std::int64_t tokens) {
  return 4.0 * static_cast<double>(tokens) * c.layers * c.kv_size();
}

void print_timing(const char* what, const kvarn_engine::timing& t) {
  if (t.tokens == 0) return;
  std::fprintf(stderr,
               "%s: %zu tokens, %.1f tokens/s (attention %.0f %% of the time, sealing %.0f %%)\n",
               what, t.tokens, t.tokens_per_second(), 100 * t.attention / t.seconds,
               100 * t.commit / t.seconds);
}

void print_bytes(const model_config& c, const kvarn_engine::cache_memory<kvarn::float16>& memory) {
  const double bytes = memory.stored_bytes();
  const double exact = fp16_bytes(c, memory.length());
  std::fprintf(stderr, "cache: %lld tokens in %.2f MB; as FP16: %.2f MB (%.2f times as much)\n",
               static_cast<long long>(memory.length()), bytes / 1e6, exact / 1e6, exact / bytes);
}

void check_context(const model_config& c, std::size_t tokens) {
  if (tokens > static_cast<std::size_t>(c.context))
    std::fprintf(stderr, "warning: %zu tokens; the model was trained for %d\n", tokens, c.context);
}

kvarn_engine::cache_choice choice_of(const arguments& a) {
  kvarn_engine::cache_choice choice = kvarn_engine::parse_cache(a.cache, a.bits);
  choice.sink = a.sink;
  choice.tail = a.tail;
  choice.group = a.group;
  if (a.int8) choice.precision = kvarn::operand_precision::int8;
  return choice;
}

// What chat_prompt needs: a model that knows the template, and texts that cannot end their turn.
void check_chat(const arguments& a, const kvarn_engine::tokenizer& vocabulary) {
  for (const char* name : {"<|im_start|>", "<|im_end|>"})
    if (!vocabulary.find_special(name))
      throw std::runtime_error("--chat: the model has no token " + std::string(name));
  for (const std::string& text : {a.system, a.prompt})
    if (vocabulary.encode(text, true).value() != vocabulary.encode(text, false).value())
      throw std::runtime_error("--chat: a message has the name of a control token: '" + text + "'");
}

void run_generation(const arguments& a, const kvarn_engine::tokenizer& vocabulary,
                    kvarn_engine::transformer& model, const kvarn_examples::thread_pool& pool) {
  const model_config& c = model.config();
  std::vector<int> prompt;
  if (vocabulary.adds_bos() && vocabulary.bos()) prompt.push_back(*vocabulary.bos());
  if (a.chat) check_chat(a, vocabulary);
  const auto text = a.chat ? kvarn_engine::chat_prompt(a.system, a.prompt) : a.prompt;
  for (const int token : vocabulary.encode(text, a.chat).value()) prompt.push_back(token);
  if (prompt.empty()) throw std::runtime_error("the prompt is empty; give --prompt");
  const std::size_t most = prompt.size() + static_cast<std::size_t>(a.most);
  check_context(c, most);

  kvarn_engine::cache_memory<kvarn::float16> memory(c, choice_of(a),
                                                    static_cast<std::int64_t>(most), pool);
  kvarn_engine::sampler draw(a.sampling);
  kvarn_engine::text_stream stream(vocabulary);
  const auto times =
      kvarn_engine::generate(model, prompt, a.chunk, a.most, draw, memory, [&](int token) {
        if (vocabulary.ends_generation(token)) return false;
        std::cout << stream.push(token) << std::flush;
        return true;
      });
  std::cout << stream.finish() << '\n';
  print_timing("prefill", times.prefill);
  print_timing("decode", times.decode);
  print_bytes(c, memory);
}

void run_benchmark(const arguments& a, const kvarn_engine::tokenizer& vocabulary,
                   kvarn_engine::transformer& model, const kvarn_examples::thread_pool& pool) {
  const std::string text = kvarn_engine::read_text(a.benchmark_text).value();
  std::vector<int> tokens = vocabulary.encode(text, false).value();
  const auto context = static_cast<std::size_t>(a.context);
  const std::size_t wanted = context + static_cast<std::size_t>(a.most);
  if (tokens.size() < wanted)
    throw std::runtime_error(a.benchmark_text + " has " + std::to_string(tokens.size()) +
                             " tokens; --context and --tokens need " + std::to_string(wanted));
  tokens.resize(wanted);
  const model_config& c = model.config();
  check_context(c, wanted);

  using memory = kvarn_engine::cache_memory<kvarn::float16>;
  const auto room = static_cast<std::int64_t>(wanted);
  memory packed(c, choice_of(a), room, pool);
  memory exact(c, kvarn_engine::parse_cache("exact", ""), room, pool);
  const auto prompt = std::span<const int>(tokens).first(context);
  for (memory* m : {&packed, &exact})
    model.prefill(prompt, a.chunk, *m, [](std::size_t, std::span<const float>) {});
  const auto times = kvarn_engine::compare_decoding(
      model, std::span<const int>(tokens).last(wanted - context), packed, exact);

  const std::string name = a.cache == "exact" ? "exact" : a.cache + "_" + a.bits;
  std::printf("%zu tokens of context, %d decoded, %d threads; ms a token: median (fastest)\n",
              context, a.most, a.threads);
  std::printf("%-18s %10s %18s %18s %10s\n", "cache", "tokens/s", "decoding", "attention", "MB");
  const memory* const memories[] = {&packed, &exact};
  for (int i = 0; i < 2; ++i)
    std::printf("%-18s %10.2f %8.2f (%7.2f) %8.3f (%7.3f) %10.2f\n",
                i == 0 ? name.c_str() : "exact FP16", 1 / times.token[i].median,
                1e3 * times.token[i].median, 1e3 * times.token[i].fastest,
                1e3 * times.attention[i].median, 1e3 * times.attention[i].fastest,
                memories[i]->stored_bytes() / 1e6);
  const auto ratio = [](const kvarn_engine::comparison::times(&t)[2]) {
    return std::pair{t[1].median / t[0].median, t[1].fastest / t[0].fastest};
  };
  const auto [decoding, decoding_fastest] = ratio(times.token);
  const auto [attention, attention_fastest] = ratio(times.attention);
  std::printf("exact FP16 / %s: decoding %.2f (%.2f), attention %.2f (%.2f)\n", name.c_str(),
              decoding, decoding_fastest, attention, attention_fastest);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Generates text with a language model whose KV cache is packed in 2 to 4 bits.",
               "kvarn-generate");
  arguments a;
  add_options(app, a);
  CLI11_PARSE(app, argc, argv);
  try {
    const auto file = kvarn_engine::gguf_file::open(a.model).value();
    kvarn_engine::read_config(file);  // refuses other architectures, whatever their tokenizer
    const auto vocabulary = kvarn_engine::tokenizer::from_gguf(file).value();
    const kvarn_engine::model_weights weights = kvarn_engine::load_model(file);
    const kvarn_examples::thread_pool pool(a.threads);
    kvarn_engine::transformer model(weights, pool);
    if (a.benchmark_text.empty())
      run_generation(a, vocabulary, model, pool);
    else
      run_benchmark(a, vocabulary, model, pool);
  } catch (const std::exception& error) {
    std::cerr << "kvarn-generate: " << error.what() << '\n';
    return 1;
  }
  return 0;
}
