#include "streams/disk/disk_tier.h"

#include <chrono>
#include <utility>

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include "streams/base/aligned_memory.h"
#include "streams/base/fault_point.h"
#include "streams/disk/mmap_allocator.h"

namespace ebb {

namespace {

c10::DataPtr cpu_memory(std::size_t bytes) {
  try {
    return c10::GetCPUAllocator()->allocate(bytes);
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::Error& error) {  // c10's own allocator throws no OutOfMemoryError
    TORCH_CHECK_WITH(OutOfMemoryError, false, "cannot allocate ", bytes,
                     " bytes of memory to copy back to: ", error.what_without_backtrace());
  }
}

void require_cpu(c10::Stream stream) {
  TORCH_CHECK(stream.device_type() == c10::kCPU, "the disk tier serves the CPU, not ", stream);
}

}  // namespace

DiskTier::DiskTier(const std::filesystem::path& folder, std::optional<std::uint64_t> capacity_bytes, DiskIo engine,
                   std::shared_ptr<Trace> trace)
    : DiskTier(std::make_unique<SpillFile>(folder), capacity_bytes, engine, std::move(trace)) {}

DiskTier::DiskTier(std::unique_ptr<SpillFile> file, std::optional<std::uint64_t> capacity_bytes, DiskIo engine,
                   std::shared_ptr<Trace> trace)
    : trace_(std::move(trace)),
      file_(file.get()),
      pool_(std::make_shared<BlockPool>(std::move(file), capacity_bytes)),
      out_(new IoQueue(engine, *file_, "ebb-out")),
      in_(new IoQueue(engine, *file_, "ebb-in")) {}

Ticket DiskTier::record(c10::Stream stream) {
  require_cpu(stream);
  return nullptr;
}

void DiskTier::make_wait(c10::Stream stream, const Ticket& ticket) {
  require_cpu(stream);
  if (ticket == nullptr || !in_force(WaitPoint::kHostWait)) {
    return;
  }
  if (ticket->done()) {
    ticket->synchronize();  // does not wait here, but throws the ticket's error
    return;
  }
  const auto start = std::chrono::steady_clock::now();
  ticket->synchronize();
  const auto end = std::chrono::steady_clock::now();
  ++stalls_;
  stalled_ns_ += std::chrono::nanoseconds(end - start).count();
  if (trace_ != nullptr) {
    trace_->add("stall", TraceTrack::kCompute, start, end, 0);
  }
}

c10::DataPtr DiskTier::take_memory(std::size_t bytes, c10::Stream /*stream*/) {
  TORCH_CHECK_WITH(OutOfMemoryError, !fails(FaultPoint::kDeviceAllocation), "cannot allocate ", bytes,
                   " bytes of memory to copy back to");
  if (bytes < MmapAllocator::kLeastBytes) {
    return cpu_memory(bytes);  // a page more would be much, and a copy out of a bounce buffer is little
  }
  const std::size_t whole_pages = round_up_to_page(bytes);
  if (memory_is_aligned_) {
    c10::DataPtr memory = cpu_memory(whole_pages);
    if (is_aligned(memory.get(), kPageBytes)) {
      return memory;
    }
    memory_is_aligned_ = false;
  }
  // An allocator whose blocks need not start on a page.
  auto whole = std::make_unique<c10::DataPtr>(cpu_memory(whole_pages + kPageBytes));
  const auto address = reinterpret_cast<std::uintptr_t>(whole->get());
  auto* const start = static_cast<std::byte*>(whole->get()) + (round_up_to_page(address) - address);
  const auto free = [](void* context) { delete static_cast<c10::DataPtr*>(context); };
  return {start, whole.release(), free, device()};
}

Ticket DiskTier::copy_out(const Block& to, const void* from, const After& after) {
  return copy(*out_, IoKind::kWrite, to, const_cast<void*>(from), after);  // a write only reads the memory
}

Ticket DiskTier::copy_in(void* to, const Block& from, const After& after) {
  return copy(*in_, IoKind::kRead, from, to, after);
}

// The calling thread is the compute stream, so the work of the streams in `after` is over.
Ticket DiskTier::copy(IoQueue& lane, IoKind kind, const Block& block, void* memory, const After& after) {
  TORCH_CHECK(!fails(FaultPoint::kCopy), "cannot queue a copy of ", block.size(), " bytes ",
              kind == IoKind::kWrite ? "to" : "from", " the spill file");
  return lane.submit({
      .kind = kind,
      .file_offset = block.address(),
      .memory = memory,
      .bytes = block.size(),
      .after = {after.tickets().begin(), after.tickets().end()},
      .trace = trace_.get(),
  });
}

StallStats DiskTier::stall_stats() const {
  constexpr double kMsPerNs = 1e-6;
  return {.count = stalls_.load(), .total_ms = static_cast<double>(stalled_ns_.load()) * kMsPerNs};
}

}  // namespace ebb
