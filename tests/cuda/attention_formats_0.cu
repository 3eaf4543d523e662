// Attention for formats 0 to 2 of the tests.
#include "cuda/attention_of.cuh"

namespace kvarn_test {

template attention_functions attention_of<0>();
template attention_functions attention_of<1>();
template attention_functions attention_of<2>();

}  // namespace kvarn_test
