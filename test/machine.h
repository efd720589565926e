#pragma once

#include <functional>
#include <optional>
#include <string>

#include <CLI/CLI.hpp>
#include <c10/core/Device.h>

namespace ebb {

// What the machines share that look for wrong gradients on the CPU or on a GPU. They exit with 2 for flags that cannot
// be used and for errors of their own.

// --device cpu or cuda, into `name`, which holds the default.
void add_device_flag(CLI::App& app, std::string& name);

// The exit status if the flags say that the program ends here, with help or with an error.
[[nodiscard]] std::optional<int> parse(CLI::App& app, int argc, char** argv);

// The device of that flag, made ready for comparisons to the bit. On the CPU freed memory turns into NaN from here on.
// On a GPU its memory can be asked for before there is a tensor.
[[nodiscard]] c10::Device prepare_device(const std::string& name);

// The status that `run` returns. What it throws is printed as an error of `program`.
[[nodiscard]] int status_of(const char* program, const std::function<int()>& run);

}  // namespace ebb
