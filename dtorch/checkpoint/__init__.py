"""Checkpoints: the state of a program on disk, written and read by the executors, each its own part.

`dtorch.save` and `dtorch.load` are :mod:`dtorch.checkpoint.api`. A save goes this way:

1. :mod:`.tree`: the state is taken apart into a tree that JSON can hold, and the tensors that hang in it.
2. :mod:`.saving`: which executor writes which bytes of which file; sent to the executors, after all that was issued.
3. :mod:`dtorch.executor.checkpoints`: they write, each its own part, into a directory beside the target.
4. :mod:`.files`: one of them puts that directory in the target's place, once all have written and synced.

:mod:`.safetensors` and :mod:`.dcp` know the two formats, in either direction; :mod:`.loading` is the way back.
Nothing is imported here, since executors read some of these modules and must not load the client.
"""
