#pragma once

#include "policy/step_record.h"

namespace ebb {

// Two storages of 10 bytes, saved at 10 and 20 ms; backward begins at 40, needs the second from 50 to 60, and the first
// from 70 to 80, where it ends. Other memory: 5 bytes.
inline StepRecord two_storages() {
  StepRecord record;
  record.storages = {{.bytes = 10, .saved_ms = 10, .needed_ms = 70, .released_ms = 80},
                     {.bytes = 10, .saved_ms = 20, .needed_ms = 50, .released_ms = 60}};
  record.other = {{0, 5}};
  record.backward_ms = 40;
  record.end_ms = 80;
  return record;
}

// The same, but the second is released at 59, and at 60 backward asks for a third of no bytes: copies in may start
// then.
inline StepRecord two_storages_and_a_need() {
  StepRecord record = two_storages();
  record.storages[1].released_ms = 59;
  record.storages.push_back({.needed_ms = 60, .released_ms = 60});
  return record;
}

}  // namespace ebb
