// Question: what are the limits of this machine's link and disk, which no offloader can beat, and how much of them do
// ebb's own tiers reach?
//
// Each rate is given as the median and the 10th and 90th percentile over repetitions, after one that does not count, in
// GB/s (1e9 bytes). A tier is measured in turn with what it is compared to, so that drift meets both alike.

#include <algorithm>
#include <iostream>

#include "bench/device.h"
#include "bench/disk_rows.h"
#include "bench/link_options.h"
#include "bench/link_rows.h"
#include "bench/result_rows.h"

namespace ebb {
namespace {

bool wanted(const LinkOptions& options, const char* part) {
  return std::find(options.parts.begin(), options.parts.end(), part) != options.parts.end();
}

int run(int argc, char** argv) {
  LinkOptions options;
  if (const auto code = parse_options(argc, argv, options)) {
    return *code;
  }
  const c10::Device device = pick_device(options.device);
  const DiskPlan disk{options.spill_folder, options.disk_bytes, options.repetitions, device_name(device)};
  ResultRows rows(options.out);
  if (wanted(options, "disk")) {
    check(disk);  // before the link is measured rather than after it
  }
  if (wanted(options, "link")) {
    if (device.is_cuda()) {
      add_link_rows(device, options.repetitions, rows);
    } else {
      std::cerr << "link: without a GPU there is no link to measure\n";
    }
  }
  if (wanted(options, "disk")) {
    add_disk_rows(disk, rows);
  }
  rows.save();
  return 0;
}

}  // namespace
}  // namespace ebb

int main(int argc, char** argv) {
  return ebb::run_benchmark("link", [&] { return ebb::run(argc, argv); });
}
