// Attention for formats 6 to 8 of the tests.
#include "cuda/attention_of.cuh"

namespace kvarn_test {

template attention_functions attention_of<6>();
template attention_functions attention_of<7>();
template attention_functions attention_of<8>();

}  // namespace kvarn_test
