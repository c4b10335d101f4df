"""Keep N replicas on their devices, and lay a program out on them.

`state` puts towers together: a `session` (devices, chosen by `placement` as the `options` say, and their communicator,
opened and closed), `replicas` (who holds which copy of a variable) and a `watch` (what looks after the run). `layout`
says which shard of a batch is whose. `step` runs a step: `traced_step` traces it and has it cut, and `step_function`
makes its one graph, in which `laying_out` lays the program out on all towers, and makes one device's results of theirs,
`feeding` splits the batch, and `exchange` joins the towers. `recovery` undoes a step that has failed;
`in_flight` knows what rests on collectives that have not ended. `shares` measures unequal towers; `audit` finds one
that computes wrong numbers; `explanation` shows what is done, `printed` as text.
"""
