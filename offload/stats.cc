#include "offload/stats.h"

namespace ebb {

std::string_view to_string(Kept reason) {
  switch (reason) {
    case Kept::kParameter:
      return "parameter";
    case Kept::kExcluded:
      return "excluded";
    case Kept::kOtherDevice:
      return "other device";
    case Kept::kEmpty:
      return "empty";
    case Kept::kUnmovable:
      return "unmovable";
    case Kept::kNonOwning:
      return "non-owning";
    case Kept::kPolicy:
      return "policy";
    case Kept::kNoRoom:
      return "no room";
    case Kept::kCaptured:
      return "captured";
    case Kept::kPutOff:
      return "put off";
  }
  return "?";
}

}  // namespace ebb
