"""`lockstep/torch_compat/flight_recorder.py`: the recorder gives JSON with a list of
collectives.
"""

import json

from lockstep.torch_compat import flight_recorder


def test_the_record_is_json() -> None:
    assert flight_recorder.read is not None
    assert "version" in json.loads(flight_recorder.read())
