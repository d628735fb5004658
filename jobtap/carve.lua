-- SPDX-License-Identifier: LGPL-3.0-or-later
-- Says who may carve how much of an allocation for user-space Kubernetes.
--
-- Step: 2 (carve). In: attributes.user.dovetail = {nodes=N, cores="all"|K} of a job that is
-- submitted, the table `dovetail-policy` of the site's configuration. Out: the job is rejected
-- with the reason, or annotated with the slices that it gets; if these are fewer, its jobspec is
-- changed. Invariants: a job that asks for no slices is never touched; nobody gets more than they
-- asked for; without a policy everything that makes sense is allowed.
local keys = { users = "table", queues = "table", ["max-nodes"] = "number", ["max-cores"] = "number",
    ["max-share"] = "number", reduce = "boolean", contact = "string" }
local policy = {}

jobtap.on("conf.update", function(conf)
    policy = conf["dovetail-policy"] or {}
    for key, value in pairs(policy) do
        local found = type(value) == "userdata" and "table" or type(value)
        if found ~= keys[key] then
            error("dovetail-policy." .. key .. (keys[key] and " is not a " .. keys[key] or " is not known"), 0)
        end
    end
end)

local function allowed(list, value)
    for _, item in ipairs(list or {}) do
        if item == value then return true end
    end
    return not list
end

local function whole(value)
    return math.type(value) == "integer" and value >= 1
end

-- The nodes that the job itself asks for; nil where it asks for cores on any number of them.
local function nodes_of(jobspec)
    for _, resource in ipairs(jobspec.resources) do
        local count = resource.type == "node" and resource.count
        if count then return type(count) == "number" and count or count.max or count.min end
    end
end

-- The slices that a job gets: what it asks for, or with `reduce` what policy leaves of it.
local function share(job, asked)
    local nodes, cores, most = asked.nodes, asked.cores or "all", policy["max-cores"]
    if policy.reduce and whole(nodes) and (cores == "all" or whole(cores)) then
        local has = nodes_of(job.jobspec) or math.huge
        nodes = math.min(nodes, policy["max-nodes"] or nodes, has * (policy["max-share"] or nodes))
        nodes = math.max(1, math.floor(nodes))
        cores = most and (cores == "all" or cores > most) and most or cores
    end
    return nodes, cores
end

local function objection(job, asked)
    local nodes, cores = share(job, asked)
    local system, has = job.jobspec.attributes.system, nodes_of(job.jobspec)
    if not whole(nodes) then
        return "nodes is a whole number from 1 on"
    elseif cores ~= "all" and not whole(cores) then
        return "cores is a whole number from 1 on, or all"
    elseif has and cores == "all" and nodes > has then
        return string.format("nodes=%d does not fit into the job's %d nodes", nodes, has)
    elseif not allowed(policy.users, job.userid) then
        return string.format("user %d may not use it here", job.userid)
    elseif not allowed(policy.queues, system.queue) then
        return string.format("it is not allowed in queue %s", system.queue or "(none)")
    elseif nodes > (policy["max-nodes"] or nodes) then
        return string.format("nodes=%d is more than the %d allowed here", nodes, policy["max-nodes"])
    elseif policy["max-cores"] and (cores == "all" or cores > policy["max-cores"]) then
        return string.format("cores=%s is more than the %d allowed on a node", cores, policy["max-cores"])
    elseif has and nodes > has * (policy["max-share"] or nodes) then
        return string.format("nodes=%d is more than %g %% of the job's %d nodes", nodes, policy["max-share"] * 100, has)
    end
end

local function request(job)
    local user = job.jobspec.attributes.user
    local asked = user and user.dovetail
    return asked and (type(asked) ~= "userdata" or not asked.slice) and asked -- slices were judged already
end

jobtap.on("job.validate", function(job)
    local asked = request(job)
    local why = asked and (type(asked) ~= "userdata" and "nodes=N is missing" or objection(job, asked))
    if why then job:reject("dovetail: " .. why .. (policy.contact and "; " .. policy.contact or "")) end
end)

jobtap.on("job.new", function(job)
    local asked = request(job)
    if asked and not job:posted("memo") then
        local nodes, cores = share(job, asked)
        local gets = { nodes = nodes, cores = cores }
        if nodes ~= asked.nodes or cores ~= (asked.cores or "all") then
            assert(job:update({ ["attributes.user.dovetail"] = gets }))
        end
        job:annotate({ dovetail = gets })
    end
end)
