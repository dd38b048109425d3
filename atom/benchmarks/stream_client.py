"""The reading side of ``front_end``, in a process of its own: opens streams and counts their events.

python -m atom.benchmarks.stream_client PORT PATH NUM_STREAMS BODY
"""

import asyncio
import json
import sys

_CHUNK = 2**16


async def _read_stream(port: int, request: bytes) -> int:
    """Events of one streamed answer, the end mark not counted."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    writer.write(request)
    num_events, tail = 0, b""
    while data := await reader.read(_CHUNK):
        # Each event begins with this; one may be split between two reads.
        seen = tail + data
        num_events += seen.count(b"data: {")
        tail = seen[-6:]
        if b"data: [DONE]\n\n" in seen[-64:]:
            break
    writer.close()
    return num_events


async def _main(port: int, path: str, num_streams: int, body: str) -> None:
    data = body.encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    counts = await asyncio.gather(*(_read_stream(port, head.encode() + data) for _ in range(num_streams)))
    print(json.dumps(counts))


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]))
