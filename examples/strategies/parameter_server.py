"""A parameter server's task: some variables, and SGD with momentum that is applied as gradients come.

Without TensorFlow, so that a task is a small process. Its neighbour is round_robin.py.
"""

import multiprocessing.connection

import numpy as np


def serve(connections, variables, trainable, learning_rate, momentum):
    """Answer workers in the order in which they ask, until none is left. The process' main function.

    Args:
        connections: one per client. `("pull",)` is answered with the variables. `("push", values)` is not
            answered: gradients are applied, values of variables that are not trainable are kept.
        variables: [V] arrays.
        trainable: [V] whether a push holds gradients of it.
        learning_rate, momentum: as Keras' SGD has them.
    """
    velocities = [np.zeros_like(variable) for variable in variables]
    while connections:
        for connection in multiprocessing.connection.wait(connections):
            try:
                request, *pushed = connection.recv()
            except EOFError:
                connections.remove(connection)
                continue
            if request == "pull":
                connection.send(variables)
                continue
            for place, value in enumerate(pushed[0]):
                if trainable[place]:
                    velocities[place] = momentum * velocities[place] - learning_rate * value
                    variables[place] = variables[place] + velocities[place]
                else:
                    variables[place] = value
