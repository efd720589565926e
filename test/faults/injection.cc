#include "test/faults/injection.h"

#include <exception>
#include <memory>
#include <system_error>
#include <utility>

#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>

#include "offload/managed/manage.h"
#include "offload/offloader.h"
#include "policy/policies.h"
#include "streams/disk/spill_corrupted.h"
#include "test/random/device_bytes.h"

namespace ebb::faults {
namespace {

std::unique_ptr<Offloader> make(const Setting& setting) {
  if (!setting.schedule) {
    return std::make_unique<Offloader>(setting.options);
  }
  return std::make_unique<Offloader>(setting.options,
                                     std::make_shared<SimulatedTier>(*setting.schedule, /*seed=*/1, std::nullopt,
                                                                     /*deferred_compute=*/false));
}

// What a step under a planned fault came to.
struct Outcome {
  std::vector<at::Tensor> gradients;
  std::optional<std::string> error;    // a typed one's text
  std::optional<std::string> untyped;  // anything else
};

template <typename Work>
Outcome outcome(Work work) {
  Outcome outcome;
  try {
    outcome.gradients = work();
    return outcome;
  } catch (const c10::Error& error) {
    outcome.error = error.what_without_backtrace();
  } catch (const std::system_error& error) {
    outcome.error = error.what();
  } catch (const SpillCorrupted& error) {
    outcome.error = error.what();
  } catch (const std::exception& error) {
    outcome.untyped = error.what();
  } catch (...) {
    outcome.untyped = "not an exception of the standard library";
  }
  forget_failed_backward();
  return outcome;
}

std::optional<std::string> held(Offloader& offloader) {
  offloader.drain();
  forget_ended_storages();
  const Stats stats = offloader.stats();
  const auto held = [](const char* what, std::uint64_t bytes) {
    return std::string(what) + " still holds " + std::to_string(bytes) + " bytes";
  };
  if (stats.pool.now_bytes != 0) {
    return held("the pool", stats.pool.now_bytes);
  }
  if (stats.stash.now_bytes != 0) {
    return held("the stash", stats.stash.now_bytes);
  }
  if (stats.window.now_bytes != 0) {
    return held("the window", stats.window.now_bytes);
  }
  if (stats.saved_on_device.now_bytes != 0) {
    return held("the device", stats.saved_on_device.now_bytes);
  }
  return std::nullopt;
}

std::optional<std::string> judge(const Outcome& found, const std::vector<at::Tensor>& expected) {
  if (found.untyped) {
    return "an error without a type: " + *found.untyped;
  }
  if (found.error) {
    for (const char* word : {"INTERNAL ASSERT", "modified by an inplace operation", "a second time"}) {
      if (found.error->find(word) != std::string::npos) {
        return "an error that is not the refusal's: " + *found.error;
      }
    }
    return found.error->empty() ? std::optional<std::string>("an error without a text") : std::nullopt;
  }
  return same(found.gradients, expected) ? std::nullopt : std::optional<std::string>("wrong gradients");
}

// A tier that the system has refused memory or a file does not ask again: what may stay on the device does from then
// on, and a weight gets no home.
bool is_for_want_of_homes(const Outcome& found, const Injection& injection) {
  return (injection.point == FaultPoint::kFallocate || injection.point == FaultPoint::kPinnedAllocation) &&
         found.error && found.error->find("there is no room for the home") != std::string::npos;
}

}  // namespace

std::vector<Setting> settings(c10::Device device) {
  Options options;
  options.device = device;
  options.policy = offload_everything();
  options.stash_bytes = 1;
  const auto with = [&](std::string name, auto change) {
    Setting setting{std::move(name), options, std::nullopt, /*managed=*/false};
    change(setting);
    return setting;
  };
  if (device.is_cuda()) {
    return {
        with("pinned", [](Setting& /*setting*/) {}),
        with("pinned, with a stash", [](Setting& setting) { setting.options.stash_bytes.reset(); }),
        with("pinned, managed", [](Setting& setting) { setting.managed = true; }),
        with("pageable", [](Setting& setting) { setting.options.host_memory = HostMemory::kPageable; }),
    };
  }
  return {
      with("disk, io_uring", [](Setting& setting) { setting.options.disk_io = DiskIo::kUring; }),
      with("disk, threads", [](Setting& setting) { setting.options.disk_io = DiskIo::kThreads; }),
      with("disk, threads, with a stash",
           [](Setting& setting) {
             setting.options.disk_io = DiskIo::kThreads;
             setting.options.stash_bytes.reset();
           }),
      with("disk, io_uring, managed",
           [](Setting& setting) {
             setting.options.disk_io = DiskIo::kUring;
             setting.managed = true;
           }),
      with("disk, threads, managed",
           [](Setting& setting) {
             setting.options.disk_io = DiskIo::kThreads;
             setting.managed = true;
           }),
      with("simulated, late, managed",
           [](Setting& setting) {
             setting.schedule = Schedule::kLate;
             setting.managed = true;
           }),
      with("simulated, late", [](Setting& setting) { setting.schedule = Schedule::kLate; }),
      with("simulated, random", [](Setting& setting) { setting.schedule = Schedule::kRandom; }),
  };
}

std::vector<std::uint64_t> count_calls(const Setting& setting, Step& step) {
  FaultPlan::disarm();
  const std::unique_ptr<Offloader> offloader = make(setting);
  static_cast<void>(step.run(offloader.get(), setting.managed));
  static_cast<void>(step.run(offloader.get(), setting.managed));
  TORCH_CHECK(step.weights_are_whole());
  TORCH_CHECK(offloader->stats().fetched.tensors > 0, "nothing went away and came back: faults would show nothing");
  std::vector<std::uint64_t> calls;
  for (std::size_t point = 0; point < kFaultPoints; ++point) {
    calls.push_back(FaultPlan::calls(static_cast<FaultPoint>(point)));
  }
  return calls;
}

Verdict inject(const Setting& setting, Step& step, const Injection& injection,
               const std::vector<at::Tensor>& expected) {
  const std::uint64_t bytes_before = graphs::settled_device_bytes(*setting.options.device);
  Verdict verdict;
  std::optional<std::string>& wrong = verdict.wrong;
  {
    std::unique_ptr<Offloader> offloader;
    {
      const PlannedFault fault(injection.point, injection.nth, injection.extent);
      const Outcome found = outcome([&] {
        offloader = make(setting);
        std::vector<at::Tensor> first = step.run(offloader.get(), setting.managed);
        TORCH_CHECK(same(first, expected), "wrong gradients");
        return step.run(offloader.get(), setting.managed);  // this one knows sizes and order
      });
      verdict.made = FaultPlan::failures(injection.point) > 0;
      wrong = judge(found, expected);
      if (found.error == "wrong gradients") {
        wrong = "wrong gradients in the first step";
      }
    }
    if (!step.weights_are_whole() && wrong == std::nullopt) {
      wrong = "a weight is lost";
    }
    if (wrong == std::nullopt && offloader != nullptr) {
      wrong = held(*offloader);
    }
    if (wrong == std::nullopt && setting.options.device->is_cuda() && cudaGetLastError() != cudaSuccess) {
      wrong = "a CUDA error was left behind";
    }
    if (offloader == nullptr) {
      offloader = make(setting);
    }
    if (wrong == std::nullopt) {
      const Outcome after = outcome([&] { return step.run(offloader.get(), setting.managed); });
      if (!is_for_want_of_homes(after, injection) && !same(after.gradients, expected)) {
        wrong =
            "wrong gradients in the step after, or an error: " + after.error.value_or(after.untyped.value_or("none"));
      }
    }
    if (!step.weights_are_whole() && wrong == std::nullopt) {
      wrong = "a weight is lost in the step after";
    }
    if (wrong == std::nullopt) {
      wrong = held(*offloader);
    }
  }
  if (wrong == std::nullopt && graphs::device_bytes_at_rest(*setting.options.device, bytes_before) != bytes_before) {
    wrong = "device memory was left behind";
  }
  return verdict;
}

}  // namespace ebb::faults
