//go:build judges

package page

import (
	"os/exec"
	"strings"
	"testing"
)

// sample is a report in JSON.
const sample = `{"model":"m","from":"2026-11-01T08:00:00Z","to":"2026-11-01T09:00:00Z",
	"measured":{"workers":3,"requests":200,"hit_rate":0.7,"ttft_mean_s":0.16,"ttft_p50_s":0.1,"ttft_p99_s":0.7,
		"requests_per_s":44.5,"computed_prompt_tokens":1000,"worker_hours":0.5},
	"history":{"workers":3,"requests":200,"hit_rate":0.71,"ttft_mean_s":0.17,"ttft_p50_s":0.1,"ttft_p99_s":0.8,
		"requests_per_s":44.5,"computed_prompt_tokens":1000,"worker_hours":0.5},
	"history_error":{"hit_rate":0.01,"ttft_mean":0.06,"ttft_p50":0,"ttft_p99":0.14},
	"baseline":{"workers":3,"requests":200,"hit_rate":0.71,"ttft_mean_s":0.17,"ttft_p50_s":0.1,"ttft_p99_s":0.8,
		"requests_per_s":44.5,"computed_prompt_tokens":1000,"worker_hours":0.5},
	"baseline_error":{"hit_rate":0.01},
	"changes":{"workers":2,"capacity":{"factor":2},"host_tier":{"tokens":1000},"policy":"dynamo","routers":4},
	"changed":{"workers":5,"requests":200,"hit_rate":0.8,"ttft_mean_s":0.1,"ttft_p50_s":0.1,"ttft_p99_s":0.8,
		"requests_per_s":44.5,"computed_prompt_tokens":700,"worker_hours":0.8},
	"expected":{"workers":5,"requests":200,"hit_rate":0.79,"ttft_mean_s":0.1,"ttft_p50_s":0.1,"ttft_p99_s":0.7,
		"requests_per_s":44.5,"computed_prompt_tokens":710,"worker_hours":0.8},
	"policy":"kvatlas","changed_policy":"dynamo","workers":[],"changed_workers":[],"engine":{},"tokens_of_a_name":512,
	"counts":{"read":400,"replayed":400},"notes":["a note"]}`

// TestReport reads a report and mutations of it, in which parts are removed or replaced. parse either fails with its
// own error, or returns finite numbers in their ranges, and texts of a bounded length.
func TestReport(t *testing.T) {
	script := `import { parse } from "./static/report.js";
		const sample = ` + sample + `;
		const junk = [null, true, -1, 2, 1e308, -1e308, 0.5, "", "x", "x".repeat(3000), "2026-11-01T08:00:00Z", [], {}, [1], [[]],
			Array(101).fill("n"), { length: 3 }, { factor: "2" }, "1e999"];
		let state = 1;
		const random = (n) => (state = (state * 48271) % 2147483647) % n;
		const share = (v) => v >= 0 && v <= 1;
		function check(r) {
			for (const of of ["measured", "history", "baseline", "changed", "expected"]) {
				if (r[of] === null && (of === "changed" || of === "expected")) continue;
				for (const v of Object.values(r[of])) if (!Number.isFinite(v) || v < 0) throw "a figure is " + v;
				if (!share(r[of].hitRate)) throw "a rate is " + r[of].hitRate;
			}
			for (const of of ["historyError", "baselineError"]) {
				for (const v of Object.values(r[of])) if (v !== null && !(Number.isFinite(v) && v >= -1)) throw "an error is " + v;
				if (r[of].hitRate === null) throw "the error of the hit rate is unknown";
			}
			if ((r.changed === null) !== (r.expected === null)) throw "half of a prediction";
			for (const text of [r.model, r.from, r.to, ...r.notes, ...r.changes]) {
				if (typeof text !== "string" || text.length > 2100) throw "a text is " + typeof text;
			}
			if (!Number.isFinite(r.replayed) || r.notes.length > 100) throw "too much";
		}
		check(parse(JSON.stringify(sample)));
		let read = 0, refused = 0;
		for (let i = 0; i < 20000; i++) {
			const copy = structuredClone(sample);
			for (let changes = 1 + random(2); changes > 0; changes--) {
				let of = copy;
				for (;;) {
					const keys = Object.keys(of), key = keys[random(keys.length)];
					if (of[key] && typeof of[key] === "object" && Object.keys(of[key]).length && random(4)) {
						of = of[key];
						continue;
					}
					if (key !== undefined && random(3)) of[key] = junk[random(junk.length)];
					else delete of[key];
					break;
				}
			}
			const text = JSON.stringify(copy).replace('"1e999"', "1e999");
			let r;
			try {
				r = parse(text);
			} catch (e) {
				if (!e.message.startsWith("This is no report of ")) throw e;
				refused++;
				continue;
			}
			check(r);
			read++;
		}
		console.log(read > 1000 && refused > 1000 ? "fine" : read + " read, " + refused + " refused");`
	out, err := exec.Command("node", "--input-type=module", "-e", script).CombinedOutput()
	if err != nil || strings.TrimSpace(string(out)) != "fine" {
		t.Errorf("%v: %s", err, out)
	}
}
