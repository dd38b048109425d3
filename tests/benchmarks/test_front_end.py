"""The front-end benchmark runs, counts every token, and prints what it measured."""

from atom.benchmarks import front_end


def test_streams_of_both_routes_are_counted_and_printed():
    results = front_end.run(num_streams=3, num_tokens=20)
    assert [(r.route, r.num_tokens) for r in results] == [("chat", 60), ("completions", 60)]
    assert all(r.tokens_per_s > 0 and r.tokens_per_cpu_s > 0 for r in results)
    table = front_end.format_table(results)
    assert "chat, 3 streams" in table and "20,000" in table
