#include "test/random/program.h"

#include <sstream>

namespace ebb::graphs {
namespace {

void print_values(std::ostream& out, const std::vector<int>& ids) {
  const char* separator = "";
  for (const int id : ids) {
    out << separator << "v" << id;
    separator = ", ";
  }
}

void print_make(std::ostream& out, const Instruction& line) {
  const auto& sizes = known_sizes()[line.numbers[0] % known_sizes().size()];
  out << "{";
  const char* separator = "";
  for (const std::int64_t size : sizes) {
    out << separator << size;
    separator = ", ";
  }
  out << "}, " << c10::toString(known_types()[line.numbers[1] % known_types().size()]) << ", /*values=*/"
      << line.numbers[2];
}

void print_backward(std::ostream& out, const Instruction& line) {
  out << "{";
  print_values(out, line.operands);
  out << "}";
  if (!line.inputs.empty()) {
    out << ", {";
    print_values(out, line.inputs);
    out << "}";
  }
  constexpr std::array<std::pair<BackwardFlag, const char*>, 4> kNames{{{kRetain, "retain_graph"},
                                                                        {kCreate, "create_graph"},
                                                                        {kElsewhere, "on another thread"},
                                                                        {kTwice, "twice at once"}}};
  for (const auto& [flag, name] : kNames) {
    if ((line.numbers[0] & flag) != 0) {
      out << ", " << name;
    }
  }
}

void print_arguments(std::ostream& out, const Instruction& line) {
  switch (line.operation->kind) {
    case Kind::kMake:
      print_make(out, line);
      break;
    case Kind::kBackward:
      print_backward(out, line);
      break;
    case Kind::kScope:
      if (line.operation->name == "guard") {
        out << "offloader " << line.numbers[0] % 2;
      }
      break;
    case Kind::kGradient:
      break;
    default:
      print_values(out, line.operands);
      for (const std::uint32_t number : line.numbers) {
        out << ", " << number;
      }
  }
}

}  // namespace

const std::vector<std::vector<std::int64_t>>& known_sizes() {
  static const std::vector<std::vector<std::int64_t>> sizes{
      {4, 4}, {8, 8}, {3, 4}, {5, 8}, {16, 16},  {2, 3, 4}, {2, 4, 4}, {1, 3, 6, 6}, {2, 2, 5, 4}, {7, 13}, {6},
      {64},   {1021}, {1},    {},     {3, 1, 5}, {32, 33},  {2, 8, 8}, {8, 2},       {2, 2, 2, 2}, {0, 4},  {0}};
  return sizes;
}

const std::vector<at::ScalarType>& known_types() {
  static const std::vector<at::ScalarType> types{at::kFloat, at::kDouble, at::kBFloat16, at::kComplexFloat, at::kHalf};
  return types;
}

std::size_t instructions(const Program& program) {
  std::size_t count = 0;
  for (const Thread& thread : program.threads) {
    count += thread.size();
  }
  return count;
}

std::string to_text(const Instruction& line) {
  std::ostringstream out;
  const bool has_result = line.operation->kind != Kind::kScope && line.operation->kind != Kind::kGradient &&
                          line.operation->name != "backward";
  if (has_result) {
    out << "v" << line.id << " = ";
  }
  out << line.operation->name << "(";
  print_arguments(out, line);
  out << ");" << (line.kept ? "  // kept" : "");
  return out.str();
}

std::string to_text(const Program& program) {
  std::string text;
  for (std::size_t i = 0; i < program.threads.size(); ++i) {
    text += "  thread " + std::to_string(i) + ":\n";
    for (const Instruction& line : program.threads[i]) {
      text += "    " + to_text(line) + "\n";
    }
  }
  return text;
}

}  // namespace ebb::graphs
