#include "loop/config.h"
