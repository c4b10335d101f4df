"""Keep N replicas on their devices, and lay a program out on them.

`state` puts towers together: a `session` (devices, chosen by `placement` as the `options` say, and their communicator),
`replicas` (each variable's copies) and a `watch` (checks between steps). `layout` says which shard of a batch is whose.
`step` runs a step: `programs` traces it and has it cut (`python_state` is what a trace may change), `step_function`
makes its one graph, and `reading` knows whose rows its batches hold. In that graph `feeding` splits the batch,
`laying_out` runs the program on all towers and combines their results, and `exchange` joins the towers. `recovery`
undoes a step that has failed; `failures` knows what has failed, and what rests on it.
`shares` measures unequal towers; `audit` finds a tower that computes wrong numbers; `explanation` describes a step,
`printed` shows it as text.
"""
