// Which work waits for which, where the bytes of a managed storage go home and come back. Kernels wait in queues, so
// that bytes moved too early, or memory freed too early, are seen.

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/Functions.h>
#include <catch2/catch.hpp>

#include "offload/managed/managed_set.h"
#include "offload/managed/postponed_work.h"
#include "test/offload/cache/ordering_world.h"

namespace ebb {
namespace {

using test::any_order;
using test::Order;
using test::OrderingWorld;

// Storages under a bound, and the uses that operations would make of them.
class ManagedWorld : public OrderingWorld {
 public:
  ManagedWorld(Order order, ManagedSet::Limits limits)
      : OrderingWorld(order.schedule, order.seed, {}),
        set_(std::make_shared<ManagedSet>(runtime->shared_residency(), runtime->steps(), limits)) {
    runtime->serve(set_);
  }

  // A storage that a kernel on the current stream is to fill.
  std::size_t add(float value, std::size_t times = 1) {
    tensors_.push_back(make(value, times));
    managed_.push_back(set_->add(tensors_.back().storage()));
    set_->fit();
    return managed_.size() - 1;
  }

  void read(std::size_t which) {
    const std::array uses{ManagedSet::Use{managed_[which], /*written=*/false}};
    managed_[which]->begin_use();
    static_cast<void>(set_->bring(uses, tier->current_stream()));
    OrderingWorld::read(tensors_[which].storage());
    set_->end(uses);
  }

  void write(std::size_t which, float value) {
    const std::array uses{ManagedSet::Use{managed_[which], /*written=*/true}};
    managed_[which]->begin_use();
    static_cast<void>(set_->bring(uses, tier->current_stream()));
    auto* const data = static_cast<float*>(tensors_[which].storage().mutable_data());
    tier->compute(tier->current_stream(), [data, value] { std::fill_n(data, kFloats, value); });
    set_->end(uses);
  }

  // Writes the bytes where they are in host memory. Returns what they were.
  std::vector<float> write_at_home(std::size_t which, float value) {
    auto* const bytes = static_cast<float*>(set_->begin_use_at_home(managed_[which]));
    REQUIRE(bytes != nullptr);
    const std::vector<float> before(bytes, bytes + kFloats);
    std::fill_n(bytes, kFloats, value);
    managed_[which]->end_use_at_home();
    return before;
  }

  bool can_be_used_at_home_during_use(std::size_t which) {
    managed_[which]->begin_use();
    const bool can = set_->begin_use_at_home(managed_[which]) != nullptr;
    managed_[which]->end_use(/*written=*/false);
    return can;
  }

  std::uint64_t evict(std::uint64_t bytes) { return runtime->evict(bytes); }

  std::uint64_t evict_during_use(std::size_t which, std::uint64_t bytes) {
    managed_[which]->begin_use();
    const std::uint64_t gone = evict(bytes);
    managed_[which]->end_use(/*written=*/false);
    return gone;
  }

  // Puts off a write on the current stream.
  std::shared_ptr<PostponedWork> postpone_write(std::size_t which, float value) {
    return std::make_shared<PostponedWork>(
        runtime->shared_residency(), tensors_[which], at::TensorList(),
        [](const auto&) { return std::make_shared<const PostponedWork::Tensors>(); },
        [this, which, value, stream = SimulatedStreamGuard::current()](const PostponedWork::Tensors&, bool) {
          const SimulatedStreamGuard there(stream);  // c10's guards know no such
          write(which, value);
        });
  }

  // The storages come back by copies in.
  void send_home() {
    leave();
    set_->drain();
  }

  // While the copies home are under way, the storages come back without copies in.
  void leave() { set_->send_home(); }
  void end(std::size_t which) {
    tensors_[which].reset();
    managed_[which].reset();
    set_->forget_the_dead();
  }
  [[nodiscard]] const void* memory(std::size_t which) const {
    return tensors_[which].storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get();
  }
  [[nodiscard]] bool is_on_device(std::size_t which) const { return managed_[which]->is_here(); }
  [[nodiscard]] std::int64_t number_on_device() const {
    return std::ranges::count_if(managed_, [](const auto& each) { return each != nullptr && each->is_here(); });
  }
  [[nodiscard]] std::uint64_t on_device_bytes() const { return set_->held_bytes(); }

 private:
  const std::shared_ptr<ManagedSet> set_;
  std::vector<at::Tensor> tensors_;
  std::vector<std::shared_ptr<ManagedStorage>> managed_;
};

constexpr std::uint64_t kBytes = OrderingWorld::kBytes;

TEST_CASE("a managed storage goes home behind the kernel that fills it, and comes back", "[managed][ordering]") {
  ManagedWorld world(any_order(), {});
  const std::size_t it = world.add(7);
  world.send_home();
  CHECK(world.on_device_bytes() == 0);
  const at::Tensor next = world.make(9);  // in the memory that has been let go of
  world.read(it);
  world.OrderingWorld::read(next.storage());
  world.run();
  CHECK(world.seen() == std::vector<float>{7, 9});
}

TEST_CASE("what is written to a managed storage goes home, too", "[managed][ordering]") {
  ManagedWorld world(any_order(), {});
  const std::size_t it = world.add(7);
  world.send_home();
  world.write(it, 8);
  world.send_home();
  world.read(it);
  world.send_home();
  world.write(it, 9);
  world.read(it);
  world.run();
  CHECK(world.seen() == std::vector<float>{8, 9});
}

TEST_CASE("a use on any stream is ordered behind work that was put off until then", "[managed][ordering]") {
  ManagedWorld world(any_order(), {1 << 20, 0});
  const std::size_t it = world.add(7);
  const std::shared_ptr<PostponedWork> work = world.postpone_write(it, 8);
  for (const int stream : {1, 0, 2}) {
    const SimulatedStreamGuard other(stream);
    work->before_use();
    world.read(it);
  }
  world.run();
  CHECK(world.seen() == std::vector<float>{8, 8, 8});
}

TEST_CASE("a managed storage's memory is let go of behind all streams that have used it", "[managed][ordering]") {
  ManagedWorld world(any_order(), {1 << 20, 0});
  const std::size_t it = world.add(7);
  world.send_home();
  world.read(it);
  {
    const SimulatedStreamGuard other(1);
    world.read(it);
  }
  world.send_home();
  const at::Tensor next = world.make(9);  // on stream 0, which knows nothing of the kernel on stream 1
  world.OrderingWorld::read(next.storage());
  world.run();
  CHECK(world.seen() == std::vector<float>{7, 7, 9});
}

TEST_CASE("what the program has waited for itself may end with the storage, whichever stream it was on",
          "[managed][ordering]") {
  ManagedWorld world(any_order(), {1 << 20, 0});
  const std::size_t it = world.add(7);
  world.send_home();
  world.run();
  {
    const SimulatedStreamGuard other(1);
    world.read(it);
  }
  world.run();  // as a program would that waits for the device
  world.end(it);
  const at::Tensor next = world.make(9);
  world.OrderingWorld::read(next.storage());
  world.run();
  CHECK(world.seen() == std::vector<float>{7, 9});
}

TEST_CASE("memory that the program made may be used on each stream that the program has ordered behind that",
          "[managed][ordering]") {
  ManagedWorld world(any_order(), {1 << 20, 0});
  world.OrderingWorld::read(world.make(5).storage());
  const std::size_t it = world.add(7);  // in the memory of the first
  world.run();                          // as a program would that waits for the device
  {
    const SimulatedStreamGuard other(1);
    world.read(it);
  }
  world.send_home();
  world.read(it);
  world.run();
  CHECK(world.seen() == std::vector<float>{5, 7, 7});
}

TEST_CASE("each stream waits for the copy in of a managed storage", "[managed][ordering]") {
  ManagedWorld world(any_order(), {1 << 20, 0});
  const std::size_t it = world.add(7);
  world.send_home();
  world.run();
  {
    const SimulatedStreamGuard other(1);
    world.read(it);
  }
  world.read(it);
  world.send_home();
  world.run();
  CHECK(world.seen() == std::vector<float>{7, 7});
}

TEST_CASE("what is on its way home is used without another copy, and what is written then goes home as well",
          "[managed][ordering]") {
  ManagedWorld world(any_order(), {1 << 20, 0});
  const std::size_t it = world.add(7);
  const void* const memory = world.memory(it);
  world.leave();
  CHECK_FALSE(world.is_on_device(it));
  CHECK(world.on_device_bytes() == kBytes);  // until the copy is done
  const at::Tensor next = world.make(5);     // would be in that memory, were it free
  world.read(it);
  CHECK(world.memory(it) == memory);
  world.leave();
  world.write(it, 8);
  world.leave();
  world.run();
  world.send_home();
  CHECK(world.on_device_bytes() == 0);
  world.read(it);
  world.run();
  CHECK(world.seen() == std::vector<float>{7, 8});
}

TEST_CASE("the host uses bytes at home behind the copy home, and before the next copy in", "[managed][ordering]") {
  ManagedWorld world(any_order(), {1 << 20, 0});
  const std::size_t it = world.add(7);
  CHECK(world.write_at_home(it, 8) == std::vector<float>(OrderingWorld::kFloats, 7));
  CHECK(world.on_device_bytes() == 0);
  world.read(it);
  world.write(it, 9);
  world.leave();
  CHECK(world.write_at_home(it, 10) == std::vector<float>(OrderingWorld::kFloats, 9));
  world.read(it);
  world.run();
  CHECK(world.seen() == std::vector<float>{8, 10});
}

TEST_CASE("the host writes bytes at home behind the copies in that read them", "[managed][ordering]") {
  ManagedWorld world(any_order(), {1 << 20, 0});
  const std::size_t it = world.add(7);
  world.send_home();
  world.read(it);  // by a kernel that has yet to run, behind a copy that has, too
  CHECK(world.write_at_home(it, 8) == std::vector<float>(OrderingWorld::kFloats, 7));
  world.read(it);
  world.run();
  CHECK(world.seen() == std::vector<float>{7, 8});
}

TEST_CASE("bytes in use on the device are not used at home", "[managed]") {
  ManagedWorld world(any_order(), {1 << 20, 0});
  const std::size_t it = world.add(7);
  CHECK_FALSE(world.can_be_used_at_home_during_use(it));
  CHECK(world.is_on_device(it));
}

TEST_CASE("what has been copied home stays until its room is asked for", "[managed][ordering]") {
  ManagedWorld world(any_order(), {2 * kBytes, 0});
  const std::size_t it = world.add(7);
  const void* const memory = world.memory(it);
  world.leave();
  world.run();
  CHECK(world.on_device_bytes() == kBytes);
  world.read(it);
  CHECK(world.memory(it) == memory);
  world.leave();
  world.run();
  world.read(world.add(8));
  world.read(world.add(9));
  CHECK(world.on_device_bytes() <= 2 * kBytes);
  CHECK_FALSE(world.is_on_device(it));
  world.read(it);
  world.run();
  CHECK(world.seen() == std::vector<float>{7, 8, 9, 7});
}

TEST_CASE("the memory that is kept of what has been copied home ends with the program's storage", "[managed]") {
  ManagedWorld world(any_order(), {1 << 20, 0});
  const std::size_t it = world.add(7);
  world.leave();
  world.run();
  CHECK(world.on_device_bytes() == kBytes);
  world.end(it);
  CHECK(world.on_device_bytes() == 0);
}

TEST_CASE("a large storage starts home by its size further ahead than fetches", "[managed]") {
  constexpr std::size_t kLarge = 4;
  constexpr std::size_t kSmall = 12;
  ManagedWorld world(any_order(), {10 * kBytes, 2 * kBytes});
  const std::size_t large = world.add(0, kLarge);
  for (std::size_t i = 0; i < kSmall; ++i) {
    world.add(0);
  }
  for (int round = 0; round < 4; ++round) {
    for (std::size_t i = 0; i <= kSmall; ++i) {
      world.write(i, static_cast<float>(round));
      world.run();
      if (round > 1 && i > 0) {
        CHECK_FALSE(world.is_on_device(large));  // and so makes room for what is fetched after the next two
      }
    }
  }
  world.read(large);
  world.run();
  CHECK(world.seen() == std::vector<float>{3});
}

TEST_CASE("what came back from its way home and was written since may be used on another stream",
          "[managed][ordering]") {
  ManagedWorld world(any_order(), {1 << 20, 0});
  const std::size_t it = world.add(7);
  world.send_home();
  world.write(it, 8);
  world.leave();
  world.write(it, 9);
  world.run();  // as a program would that waits for the device
  {
    const SimulatedStreamGuard other(1);
    world.read(it);
  }
  world.send_home();
  world.read(it);
  world.run();
  CHECK(world.seen() == std::vector<float>{9, 9});
}

TEST_CASE("a storage that ends after it came back from its way home frees no memory that the copy reads",
          "[managed][ordering]") {
  ManagedWorld world(any_order(), {1 << 20, 0});
  const std::size_t it = world.add(7);
  world.leave();
  world.read(it);
  world.end(it);
  const at::Tensor next = world.make(9);
  world.OrderingWorld::read(next.storage());
  world.run();
  CHECK(world.seen() == std::vector<float>{7, 9});
}

TEST_CASE("where the device is full, what is expected last goes home, behind what has used it", "[managed][ordering]") {
  ManagedWorld world(any_order(), {1 << 20, 0});
  const std::size_t first = world.add(7);
  const std::size_t second = world.add(8);
  for (int i = 0; i < 2; ++i) {
    world.read(first);
    world.read(second);
  }
  world.write(second, 5);
  world.read(first);
  world.write(second, 6);
  CHECK(world.evict(kBytes) == kBytes);
  CHECK(world.is_on_device(first));
  CHECK_FALSE(world.is_on_device(second));
  CHECK(world.on_device_bytes() == kBytes);
  const at::Tensor next = world.make(9);  // in the memory that has been let go of
  world.OrderingWorld::read(next.storage());
  world.read(second);
  world.run();
  CHECK(world.seen() == std::vector<float>{7, 8, 7, 8, 7, 9, 6});
}

TEST_CASE("where the device is full, memory whose copy home is under way is let go of first", "[managed][ordering]") {
  ManagedWorld world(any_order(), {1 << 20, 0});
  const std::size_t first = world.add(7);
  world.leave();
  const std::size_t second = world.add(8);
  const bool is_under_way = world.on_device_bytes() == 2 * kBytes;  // in some orders the copy is done by now
  CHECK(world.evict(kBytes) == kBytes);
  CHECK(world.is_on_device(second) == is_under_way);
  const at::Tensor next = world.make(9);
  world.OrderingWorld::read(next.storage());
  world.read(first);
  world.read(second);
  world.run();
  CHECK(world.seen() == std::vector<float>{9, 7, 8});
}

TEST_CASE("where the device is full, a managed storage in use stays", "[managed]") {
  ManagedWorld world(any_order(), {1 << 20, 0});
  const std::size_t used = world.add(7);
  const std::size_t unused = world.add(8);
  CHECK(world.evict_during_use(used, 2 * kBytes) == kBytes);
  CHECK(world.is_on_device(used));
  CHECK_FALSE(world.is_on_device(unused));
}

TEST_CASE("the order of uses is learned, and what comes next is prefetched within the bound", "[managed]") {
  ManagedWorld world(any_order(), {3 * kBytes, kBytes});
  for (int i = 0; i < 6; ++i) {
    world.add(static_cast<float>(i));
  }
  std::vector<float> expected;
  for (int round = 0; round < 4; ++round) {
    for (std::size_t i = 0; i < 6; ++i) {
      world.read(i);
      expected.push_back(static_cast<float>(i));
      CHECK(world.on_device_bytes() <= 3 * kBytes);
      if (round == 1) {
        world.run();  // copies home are done, for which a prefetch would not wait
      }
      if (round > 1) {
        CHECK(world.is_on_device((i + 1) % 6));
      }
    }
  }
  world.run();
  CHECK(world.seen() == expected);
}

TEST_CASE("a prefetched storage that the program lets go of frees no memory that the copy writes to",
          "[managed][ordering]") {
  ManagedWorld world(any_order(), {2 * kBytes, kBytes});
  for (int i = 0; i < 3; ++i) {
    world.add(static_cast<float>(i));
  }
  for (const std::size_t i : {0, 1, 2, 0, 1, 2}) {
    world.read(i);
    world.run();  // copies home are done, for which a prefetch would not wait
  }
  world.read(0);
  REQUIRE(world.is_on_device(1));
  world.end(1);
  const at::Tensor next = world.make(9);
  world.OrderingWorld::read(next.storage());
  world.run();
  CHECK(world.seen() == std::vector<float>{0, 1, 2, 0, 1, 2, 0, 9});
}

}  // namespace
}  // namespace ebb
