"""A process that trains by one strategy as it is asked to: `python -m strategies.worker NAME ARGUMENTS`.

Its driver is compare_strategies.py, by the turns of `ncclsync.tools.bench`. TensorFlow is imported by what
needs it only: strategies with processes of their own start them from here.
"""

import faulthandler
import json
import sys

from ncclsync.tools.bench.turns import Requests

LIMIT_S = 300  # for one request; a process that hangs ends, and tells where it hung


def main(name, arguments):
    """Serve until the driver closes standard input, or until an error, which it is told."""
    requests = Requests()
    session = None
    try:
        from strategies.session import Session

        session = Session(name, **arguments)
        while True:
            request = requests.next()
            faulthandler.dump_traceback_later(LIMIT_S, exit=True)
            answer = getattr(session, request.pop("do"))(**request)
            faulthandler.cancel_dump_traceback_later()
            requests.answer(**answer)
    except Exception as error:  # whatever it is, the driver tells it
        requests.fail(error)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
