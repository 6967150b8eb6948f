/* SPDX-License-Identifier: Apache-2.0
 *
 * apart.c - names that nobody else uses.
 */
#include "config.h"

#include "fault.h"

#include <net/if.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <unistd.h>

static void loopback_up(void) {
    struct ifreq r = {.ifr_name = "lo"};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return;
    if (ioctl(fd, SIOCGIFFLAGS, &r) == 0) {
        r.ifr_flags = (short)(r.ifr_flags | IFF_UP);
        (void)ioctl(fd, SIOCSIFFLAGS, &r);
    }
    close(fd);
}

bool stand_apart(void) {
    if (!device_is_host() || unshare(CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC) != 0)
        return false;
    loopback_up();
    return mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0 &&
           (getenv("FAULT_SHM") != NULL ||
            mount("fault", "/dev/shm", "tmpfs", 0, "size=64m,mode=1777") == 0);
}
