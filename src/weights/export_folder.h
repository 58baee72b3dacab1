// Where an exported model goes.
#pragma once

#include <string>

#include "base/status.h"

namespace tessera {

// An error when `folder` exists, or when none can be made there. Needs no model: ask before hours of work.
Status check_export_folder(const std::string& folder);

}  // namespace tessera
