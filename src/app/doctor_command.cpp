#include "app/backend_choice.h"
#include "app/commands.h"
#include "app/output.h"

namespace octet::app {

int run_doctor(const DoctorArguments& arguments) {
  print("octet " OCTET_VERSION "\n" + describe_device(arguments.device));
  return 0;
}

}  // namespace octet::app
