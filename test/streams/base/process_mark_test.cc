#include "streams/base/process_mark.h"

#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <string>

#include <c10/util/Exception.h>
#include <catch2/catch.hpp>

namespace ebb {
namespace {

// Whether `holds` is true in a forked child.
bool in_child(const std::function<bool()>& holds) {
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    _exit(holds() ? 0 : 1);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace

TEST_CASE("a mark tells the child of a fork from its parent, and the child's child from both") {
  const ProcessMark parents;
  CHECK(in_child([&] {
    const ProcessMark childs;
    return parents.forked() && !childs.forked() && in_child([&] { return parents.forked() && childs.forked(); }) &&
           !childs.forked();
  }));
  CHECK_FALSE(parents.forked());
}

TEST_CASE("a copied mark is of the process where the first one was made") {
  const ProcessMark parents;
  CHECK(in_child([&] { return ProcessMark(parents).forked(); }));
}

TEST_CASE("using what was made before fork is an error that names it, in the child only") {
  const ProcessMark mark;
  CHECK_NOTHROW(mark.check("this thing"));
  CHECK(in_child([&] {
    try {
      mark.check("this thing");
      return false;
    } catch (const c10::Error& error) {
      return std::string(error.what()).starts_with("ebb: this thing was made before fork");
    }
  }));
}

TEST_CASE("an object that is shared unless forked is destroyed by the parent and leaked by the child") {
  struct Counts {
    explicit Counts(int& destroyed) : destroyed(destroyed) {}
    ~Counts() { ++destroyed; }
    int& destroyed;
  };
  int destroyed = 0;
  std::shared_ptr<Counts> object = make_shared_unless_forked<Counts>(destroyed);
  CHECK(in_child([&] {
    object.reset();
    return destroyed == 0;
  }));
  object.reset();
  CHECK(destroyed == 1);
}

}  // namespace ebb
