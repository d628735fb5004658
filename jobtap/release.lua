-- SPDX-License-Identifier: LGPL-3.0-or-later
-- Holds the epilog of a slice's job until nothing of its part of Kubernetes is left.
--
-- Step: 8 (teardown). In: jobs with attributes.user.dovetail.slice, the answer of the service
-- `dovetail` to `wait-down`. Out: the job's resources are free for others only afterwards.
-- Invariant: the epilog ends after the limit at the latest, and then says so on the job; where
-- there is no such service nothing is held, since then nobody could confirm.
local epilog = "dovetail-release"
local limit = 30 -- seconds

jobtap.on("conf.update", function(conf)
    local given = conf.dovetail and conf.dovetail["down-timeout"] or 30
    if type(given) ~= "number" or given <= 0 then
        error("dovetail.down-timeout is a number of seconds", 0)
    end
    limit = given
end)

jobtap.on("job.state.cleanup", function(job)
    local user = job.jobspec.attributes.user
    local slice = user and user.dovetail and user.dovetail.slice
    -- Without resources, the job never ran.
    if not (slice and job.R and job:epilog_start(epilog)) then
        return
    end
    local question = { id = job.id, slice = slice }
    job:rpc("dovetail.wait-down", question, limit, function(reply, why, code)
        local confirmed = reply or code == "ENOSYS"
        if not confirmed then
            job:raise("dovetail", 4, "teardown is not confirmed: " .. why)
        end
        job:epilog_finish(epilog, confirmed and 0 or 1)
    end)
end)
