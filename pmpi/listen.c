/* SPDX-License-Identifier: LGPL-3.0-or-later
 *
 * Has MPI listen on the address that it needs and no other.
 *
 * Open MPI's starter, daemons and ranks, and MPICH's starter, can be told which of their addresses
 * they tell each other, but not where to listen, which is everywhere: orte/mca/oob/tcp and
 * opal/mca/btl/tcp of Open MPI 4 and 5, HYDU_sock_listen of MPICH 4.
 *
 * In: DOVETAIL_LISTEN, an IPv4 address of this machine, and calls of bind(2) from those. Out: the
 * same calls, with that address for "all", and with loopback for all of IPv6, which they open too
 * and are told not to use. Invariants: who asks for an address gets that one, and nobody else's
 * call is touched, be it in the same program; where this machine does not have such an address,
 * MPI listens as ever.
 */
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "attributes.h"

EXPORTED int bind(int fd, const struct sockaddr *address, socklen_t size);

/* Is this place in the code of one that listens everywhere? */
static bool is_mpi(void *place)
{
    static const char *const files[] = {"mca_oob_tcp.", "mca_btl_tcp.", "libopen-",
                                        "libprrte.",    "mpiexec",      "mpirun"};
    Dl_info found;
    if (dladdr(place, &found) == 0 || found.dli_fname == NULL)
        return false;
    const char *slash = strrchr(found.dli_fname, '/');
    const char *name = slash ? slash + 1 : found.dli_fname;
    for (size_t i = 0; i < sizeof(files) / sizeof(*files); i++)
        if (strncmp(name, files[i], strlen(files[i])) == 0)
            return true;
    return false;
}

/* Makes an address that stands for all stand for one; false for any other. The port stays. */
static bool narrow(struct sockaddr_storage *all, const char *to)
{
    struct sockaddr_in *four = (struct sockaddr_in *)all;
    struct sockaddr_in6 *six = (struct sockaddr_in6 *)all;
    if (all->ss_family == AF_INET && four->sin_addr.s_addr == htonl(INADDR_ANY))
        return inet_pton(AF_INET, to, &four->sin_addr) == 1;
    if (all->ss_family != AF_INET6 || memcmp(&six->sin6_addr, &in6addr_any, sizeof(in6addr_any)))
        return false;
    six->sin6_addr = in6addr_loopback;
    return true;
}

static bool is_stream(int fd)
{
    int kind = 0;
    socklen_t size = sizeof(kind);
    return getsockopt(fd, SOL_SOCKET, SO_TYPE, &kind, &size) == 0 && kind == SOCK_STREAM;
}

int bind(int fd, const struct sockaddr *address, socklen_t size)
{
    int (*next)(int, const struct sockaddr *, socklen_t);
    *(void **)&next = dlsym(RTLD_NEXT, "bind");
    const char *where = secure_getenv("DOVETAIL_LISTEN");
    struct sockaddr_storage one = {0};
    int saved = errno;
    if (where && address && size <= sizeof(one) && is_mpi(__builtin_return_address(0)) &&
        narrow(memcpy(&one, address, size), where) && is_stream(fd)) {
        int bound = next(fd, (const struct sockaddr *)&one, size);
        if (bound == 0 || errno != EADDRNOTAVAIL)
            return bound;
    }
    errno = saved;
    return next(fd, address, size);
}
