// SPDX-License-Identifier: LGPL-3.0-or-later
// The first process of every pod: holds its namespaces and collects its dead.
//
// Built static and tiny, since every pod has one. Ends on SIGTERM and SIGINT with 0.
#include <signal.h>
#include <stddef.h>
#include <sys/wait.h>
#include <unistd.h>

static void leave(int number)
{
    (void)number;
    _exit(0);
}

static void reap(int number)
{
    (void)number;
    while (waitpid(-1, NULL, WNOHANG) > 0)
        ;
}

int main(void)
{
    struct sigaction action = {.sa_handler = reap, .sa_flags = SA_NOCLDSTOP};
    if (sigaction(SIGCHLD, &action, NULL) < 0)
        return 1;
    action.sa_handler = leave;
    if (sigaction(SIGTERM, &action, NULL) < 0 || sigaction(SIGINT, &action, NULL) < 0)
        return 1;
    for (;;)
        pause();
}
