#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/Stream.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

#include "offload/base/operator_traits.h"
#include "offload/tensors/version_check.h"
#include "policy/policy.h"

namespace ebb {

class AutogradInfo;
class SavedStep;
class SavedStorage;

// Whether a custom function has returned the tensor, or what the tensor is a view of.
[[nodiscard]] bool is_customs(const at::TensorBase& tensor);

// The bytes that a storage has from one write to the next. Numbered by a log.
using ValueId = std::uint64_t;
inline constexpr ValueId kNoValue = ~ValueId{0};

// An operation as it was run, and its tensors without their bytes.
struct LoggedOperation {
  struct TensorArgument {
    ValueId value = kNoValue;  // before the operation; kNoValue: an undefined tensor
    ValueId after = kNoValue;  // where the operation writes to the storage
    std::size_t bytes = 0;     // of the storage
    at::ScalarType dtype = at::ScalarType::Undefined;
    c10::Device device = c10::kCPU;
    bool is_managed = false;
    bool requires_grad = false;
    bool is_of_leaf = false;      // a leaf or a view of one
    bool is_filled_anew = false;  // written from end to end, whatever was there, or running statistics in training:
                                  // nothing that is made again depends on them
    std::int64_t offset = 0;
    c10::SmallVector<std::int64_t, 5> sizes;
    c10::SmallVector<std::int64_t, 5> strides;
  };
  static constexpr std::uint32_t kNoTensors = 0xFFFFFFFF;

  explicit LoggedOperation(c10::OperatorHandle handle) : operation(std::move(handle)) {}

  c10::OperatorHandle operation;
  OperatorTraits traits;
  c10::SmallVector<c10::IValue, 6> arguments;           // None where the argument is in `tensors`
  c10::SmallVector<std::uint32_t, 6> tensors_in;        // by argument, how many of `tensors`, or kNoTensors
  c10::SmallVector<TensorArgument, 3> tensors;          // in the order of the arguments
  c10::SmallVector<ValueId, 2> made;                    // by returned tensor; kNoValue where it was there before
  std::vector<std::uint8_t> random_state;               // of a generator that is drawn from, before that
  c10::Stream stream{c10::Stream::DEFAULT, c10::kCPU};  // the current stream
};

// The operations that a thread runs under a guard, in order, as the dispatcher sees them below autograd and autocast:
// what each took and made. From the log any value can be made again whose operations, and theirs, can be run again.
//
// Note [What is an operation]
// The observer (managed/observed_operations.h) sees each call of the dispatcher, from the outermost inwards. A call
// opens an entry where its own kernels do the work and can do the work again. No call does that is composite, that
// autocast would cast the arguments of, that a transform of functorch's or Python's dispatch takes over, whose schema
// need not say what it writes, or that is inside of an open entry. What autograd saves in an open entry is decided
// about when the entry ends, because the operation may fill later what it saves first, and nobody knows before that
// what made the value.
//
// Note [What a log does not know]
// A value is opaque, and nothing is made again through it, where the log has not seen all of what made it: bytes from
// before the guard, memory that no call has returned (compiled blocks take theirs so, and their kernels write without
// the dispatcher), memory that nothing seen has filled, what a custom function returns, in which such kernels are
// launched, writes that only a version tells of, and copies from a GPU to host memory, which the program may have to
// wait for. Operations on tensors without a gradient are not logged: nothing is made again through them.
//
// Ownership: a log keeps no bytes alive, but for numbers and states of generators. Recipes share its operations. The
// oldest are forgotten: while one guard lives, thousands of forward passes may run.
//
// Threads: a log is its thread's.
class OperationLog {
 public:
  // A save of a value, under a guard. Lives as long as the save.
  struct Save {
    VersionCheck version;
    std::weak_ptr<SavedStorage> storage;
    bool passes_through;  // without a SavedStorage
    const void* data;
    bool is_of_leaf;  // of a leaf or a view of a leaf, whose bytes the program holds
  };

  struct Value {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    c10::VariableVersion counter;
    std::uint32_t version;
    std::size_t bytes = 0;
    std::uint64_t maker = kOpaque;        // the operation's place in the log
    bool is_foreign = false;              // the memory was seen before any call returned it
    std::weak_ptr<const Save> save = {};  // the last one
    struct Asked {
      std::weak_ptr<const void> pass;     // SavedStep::pass()
      std::weak_ptr<SavedStorage> saved;  // the last one
      std::uint64_t place;                // for proofs of the value's recipe
      std::uint32_t ordinal;
      Decision decision;
    };
    // Where a recipe begins from the value itself, which autograd does not save. Few are such.
    struct OfRecipes {
      std::optional<Asked> asked;              // what was decided about the value
      std::function<void(bool)> before_write;  // before_write()
    };
    std::unique_ptr<OfRecipes> of_recipes = nullptr;

    [[nodiscard]] const Asked* asked() const {
      return of_recipes != nullptr && of_recipes->asked ? &*of_recipes->asked : nullptr;
    }
  };
  static constexpr std::uint64_t kOpaque = ~std::uint64_t{0};

  OperationLog() = default;
  OperationLog(const OperationLog&) = delete;
  OperationLog& operator=(const OperationLog&) = delete;

  // The calling thread's log; null where none of its guards logs, and at rest.
  [[nodiscard]] static OperationLog* here() { return is_at_rest() ? nullptr : here_; }

  // Has the calling thread's log forget everything. Operations are logged again from wake() or the next scope on.
  // Nothing happens in an open entry, or where several scopes live: each may need the log.
  static void rest();
  static void wake();
  [[nodiscard]] static bool is_at_rest() { return here_ != nullptr && here_->rests_; }

  // Has the calling thread's operations logged for as long as one of these lives on the thread.
  class Scope {
   public:
    Scope();
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    const std::shared_ptr<OperationLog> log_;
  };

  // While one lives, no operation of the thread is logged, or even looked at for the log. So a function is compiled as
  // without a guard: compilers tell threads apart by the dispatch keys that are included.
  class Unseen {
   public:
    Unseen();
    ~Unseen();
    Unseen(const Unseen&) = delete;
    Unseen& operator=(const Unseen&) = delete;

   private:
    OperationLog* const log_;
    const bool was_included_;
  };

  // The tensors that a call writes to, with the values before.
  using Written = std::vector<std::pair<at::Tensor, ValueId>>;

  // One call of the dispatcher. See Note [What is an operation].
  class Call {
   public:
    Call(OperationLog& log, const c10::OperatorHandle& operation, const OperatorTraits& always,
         c10::DispatchKeySet keys, const torch::jit::Stack& stack);
    ~Call();
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

    // To be called when the kernels have returned so many results. Does what at_end() was given, and throws what that
    // throws.
    void end(const torch::jit::Stack& stack, std::size_t returns);

   private:
    OperationLog& log_;
    const ValueId before_;                    // later values have been seen since the call began
    std::shared_ptr<LoggedOperation> entry_;  // null where the call opens none
    Written written_;
    bool has_ended_ = false;
  };

  [[nodiscard]] bool is_open() const { return is_open_; }

  // Whether a guard of the thread still logs. A guard may have ended on another thread.
  [[nodiscard]] bool has_scope() const { return scopes_ > 0; }
  static void stop_here();

  // Whether the thread's operations are seen: some of LibTorch's guards put the thread's dispatch keys back.
  [[nodiscard]] bool sees() const;

  // Does something when the open entry ends; with true where the operation has failed.
  void at_end(std::function<void(bool failed)> what) { at_end_.push_back(std::move(what)); }

  // What the tensor's storage has now; kNoValue where the log has not seen it.
  [[nodiscard]] ValueId value_of(const at::Tensor& tensor) const;

  // Null where the log has forgotten the value, or the operation.
  [[nodiscard]] const Value* value(ValueId id) const {
    return id - first_value_ < values_.size() ? &values_[id - first_value_] : nullptr;
  }
  [[nodiscard]] std::shared_ptr<const LoggedOperation> operation(std::uint64_t place) const {
    return place - first_operation_ < operations_.size() ? operations_[place - first_operation_] : nullptr;
  }

  // Notes what was decided about the value in a step; and what that was, nullopt for nothing.
  void asked(ValueId id, Value::Asked about) { of_recipes(id).asked = std::move(about); }
  [[nodiscard]] std::optional<Value::Asked> asked_about(ValueId id, SavedStep& step) const;

  // Has `what` called before the first operation of the thread that writes to the value's memory, with true; or with
  // false where the log forgets the value, and sees no more writes. What `what` then throws is lost.
  void before_write(ValueId id, std::function<void(bool is_seen)> what);

  // Whether the storage still has this value, as far as the log knows.
  [[nodiscard]] bool is_current(ValueId id) const;

  // Notes that autograd saves the tensor. `storage`: what has its bytes; null where the save passes through. The
  // result, which may be null, is to live as long as the save.
  [[nodiscard]] std::shared_ptr<const void> saved(const at::Tensor& tensor, const AutogradInfo& info,
                                                  const std::shared_ptr<SavedStorage>& storage);

  // Forgets all but the newest operations, and what was decided about values.
  void forget_but(std::size_t operations);
  void forget();

 private:
  [[nodiscard]] Value::OfRecipes& of_recipes(ValueId id);
  [[nodiscard]] ValueId see(const at::Tensor& tensor);
  void forget_oldest(std::size_t operations, std::size_t values);
  [[nodiscard]] std::shared_ptr<LoggedOperation> new_entry(const c10::OperatorHandle& operation);
  void take_back(std::shared_ptr<LoggedOperation> entry) noexcept;
  ValueId add(const at::Tensor& tensor, std::uint64_t maker, bool is_foreign);
  [[nodiscard]] std::shared_ptr<LoggedOperation> entry_of(const c10::OperatorHandle& operation,
                                                          const OperatorTraits& traits, c10::DispatchKeySet keys,
                                                          c10::ArrayRef<c10::IValue> arguments);
  [[nodiscard]] bool take_arguments(LoggedOperation& entry, c10::ArrayRef<c10::IValue> arguments);
  void open();
  void close(bool failed);

  static inline thread_local OperationLog* here_ = nullptr;

  std::atomic<int> scopes_{0};
  bool is_open_ = false;
  bool rests_ = false;
  const Written* written_now_ = nullptr;  // by the call of the open entry
  std::uint64_t first_operation_ = 0;     // of those that the log still has
  ValueId first_value_ = 0;
  std::deque<std::shared_ptr<LoggedOperation>> operations_;
  std::vector<std::shared_ptr<LoggedOperation>> spare_;  // forgotten, to be filled anew: allocating takes long
  std::deque<Value> values_;
  ska::flat_hash_map<const c10::StorageImpl*, ValueId> now_;
  std::vector<std::function<void(bool)>> at_end_;
};

}  // namespace ebb
