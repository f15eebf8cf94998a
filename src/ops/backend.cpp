#include "ops/backend.h"
