// Many threads, one offloader or two.

#include <array>
#include <barrier>
#include <memory>
#include <stdexcept>
#include <vector>

#include <ATen/TensorOperators.h>
#include <catch2/catch.hpp>

#include "test/offload/networks.h"
#include "test/offload/on_threads.h"
#include "test/offload/parity.h"

namespace ebb {
namespace {

TEST_CASE_METHOD(NoLeak, "sixteen threads on one offloader each get their own exact gradients") {
  const std::array<Program, 2> programs{train(two_layers, true), train(two_layers, false)};
  const Outcome expected = plain(programs[0]);
  for (const Setting& setting : some_settings()) {
    INFO(setting.name);
    Rig rig(setting);
    std::array<std::vector<Outcome>, 16> outcomes;
    on_threads(16, [&](std::size_t i) {
      for (int step = 0; step < 4; ++step) {
        outcomes[i].push_back(outcome(programs[i % 2], Run(&rig.offloader())));
      }
    });
    for (const auto& of_thread : outcomes) {
      for (const Outcome& found : of_thread) {
        check_same(expected, found);
      }
    }
    rig.check_empty();
  }
}

TEST_CASE_METHOD(NoLeak, "guards of two offloaders that cross on two threads keep to their own") {
  Rig first(late_without_stash());
  Rig second(disk());
  std::array<Rig*, 2> rigs{&first, &second};
  std::array<Inputs, 2> in;
  std::array<at::Tensor, 2> losses;
  std::barrier both(2);
  on_threads(2, [&](std::size_t i) {
    const OffloadGuard outer(rigs[i]->offloader());
    both.arrive_and_wait();
    at::Tensor x = in[i].activation({16}).exp();  // saved once
    {
      both.arrive_and_wait();
      const OffloadGuard inner(rigs[1 - i]->offloader());
      both.arrive_and_wait();
      x = (x * 1.5).sin().sin().sin();  // three times
    }
    both.arrive_and_wait();
    losses[i] = (x * 1.5).sin().sin().sum();  // twice
  });
  CHECK(first.stats().saved.tensors == 6);
  CHECK(second.stats().saved.tensors == 6);
  on_threads(2, [&](std::size_t i) { losses[1 - i].backward(); });
  CHECK(in[0].gradients()[0].equal(in[1].gradients()[0]));
  CHECK(first.stats().fetched.tensors == 6);
  CHECK(second.stats().fetched.tensors == 6);
}

TEST_CASE_METHOD(NoLeak, "threads that drop graphs disturb none that go backward through theirs") {
  const Outcome expected = plain(train(two_layers, false));
  for (const Setting& setting : some_settings()) {
    INFO(setting.name);
    Rig rig(setting);
    std::array<std::vector<Outcome>, 6> outcomes;
    on_threads(outcomes.size(), [&](std::size_t i) {
      for (int step = 0; step < 6; ++step) {
        if (i % 2 == 0) {
          outcomes[i].push_back(outcome(train(two_layers, false), Run(&rig.offloader())));
        } else {
          Inputs in;
          const OffloadGuard guard(rig.offloader());
          static_cast<void>(two_layers(in));
        }
      }
    });
    for (const auto& of_thread : outcomes) {
      for (const Outcome& found : of_thread) {
        check_same(expected, found);
      }
    }
    rig.check_empty();
  }
}

TEST_CASE_METHOD(NoLeak, "errors on some threads reach those, and the others' gradients are exact") {
  const Program good = train(two_layers, true);
  const Program bad = [](const Run& run) -> Tensors {
    Inputs in;
    const auto guard = run.guard();
    const at::Tensor out = two_layers(in);
    out.register_hook([](const at::Tensor&) { throw std::runtime_error("one thread's hook failed"); });
    in.loss(out.exp()).backward();
    return {};
  };
  const Outcome expected = plain(good);
  Rig rig(late_without_stash());
  std::array<Outcome, 8> outcomes;
  on_threads(outcomes.size(),
             [&](std::size_t i) { outcomes[i] = outcome(i % 2 == 0 ? good : bad, Run(&rig.offloader())); });
  for (std::size_t i = 0; i < outcomes.size(); ++i) {
    if (i % 2 == 0) {
      check_same(expected, outcomes[i]);
    } else {
      CHECK_THAT(outcomes[i].error, Catch::Contains("one thread's hook failed"));
    }
  }
}

TEST_CASE_METHOD(NoLeak, "statistics may be read while threads work, and end where the work ends") {
  Rig rig(late_without_stash());
  std::array<Outcome, 4> outcomes;
  on_threads(5, [&](std::size_t i) {
    for (int step = 0; step < 10; ++step) {
      if (i < outcomes.size()) {
        outcomes[i] = outcome(train(two_layers, true), Run(&rig.offloader()));
      } else {
        static_cast<void>(rig.stats());
        rig.offloader().drain();
      }
    }
  });
  const Outcome expected = plain(train(two_layers, true));
  for (const Outcome& found : outcomes) {
    check_same(expected, found);
  }
  const Stats stats = rig.stats();
  CHECK(stats.steps == 40);
  CHECK(stats.saved.tensors % 40 == 0);
}

TEST_CASE_METHOD(NoLeak, "an offloader may end while another thread goes backward through its graph") {
  const Outcome expected = plain(train(two_layers, false));
  for (int round = 0; round < 10; ++round) {
    auto offloader = std::make_unique<Offloader>(disk().options);
    Inputs in;
    at::Tensor loss;
    {
      const OffloadGuard guard(*offloader);
      loss = in.loss(two_layers(in));
    }
    on_threads(2, [&](std::size_t i) {
      if (i == 0) {
        loss.backward();
      } else {
        offloader.reset();
      }
    });
    check_same({{expected.tensors.begin() + 1, expected.tensors.end()}, ""}, {in.gradients(), ""});
  }
}

}  // namespace
}  // namespace ebb
