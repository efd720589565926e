#include "bench/step_shape.h"

#include <stdexcept>

namespace ebb {

const std::vector<StepShape>& step_shapes() {
  static const std::vector<StepShape> shapes{
      {"w1",
       {.vocab = 128256, .dim = 4096, .layers = 9, .heads = 32, .kv_heads = 8, .ffn = 14336, .rope_theta = 500000.0},
       8,
       1024},
      {"small",
       {.vocab = 32000, .dim = 1024, .layers = 16, .heads = 16, .kv_heads = 8, .ffn = 3584, .rope_theta = 500000.0},
       8,
       1024},
      {"tiny",
       {.vocab = 256, .dim = 256, .layers = 4, .heads = 8, .kv_heads = 4, .ffn = 704, .rope_theta = 1e4},
       4,
       256},
  };
  return shapes;
}

StepShape step_shape(const std::string& name) {
  std::string names;
  for (const StepShape& shape : step_shapes()) {
    if (shape.name == name) {
      return shape;
    }
    names += (names.empty() ? "" : ", ") + shape.name;
  }
  throw std::invalid_argument("unknown shape \"" + name + "\": there are " + names);
}

}  // namespace ebb
