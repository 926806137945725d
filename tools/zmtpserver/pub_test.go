package zmtpserver

import (
	"bytes"
	"testing"
)

// FuzzTopics compares a subscriber's topics with a list of the active topics.
func FuzzTopics(f *testing.F) {
	f.Add([]byte("+a+ab-a+a-b"), []byte("abc"))
	f.Fuzz(func(t *testing.T, script, probe []byte) {
		var ts topics
		var list []string
		for len(script) > 0 {
			on, n := script[0]&1 == 1, min(int(script[0]>>5), len(script)-1)
			topic := string(script[1 : 1+n])
			script = script[1+n:]
			if err := ts.set(on, topic); err != nil {
				t.Fatal(err) // the script is too short for the bound
			}
			if on {
				list = append(list, topic)
				continue
			}
			for i := range list {
				if list[i] == topic {
					list = append(list[:i], list[i+1:]...)
					break
				}
			}
		}
		want := false
		for _, topic := range list {
			want = want || bytes.HasPrefix(probe, []byte(topic))
		}
		if ts.match(probe) != want || len(ts.count) > 0 != (len(list) > 0) {
			t.Fatalf("match %v any %v, in force are %q", ts.match(probe), len(ts.count) > 0, list)
		}
		bytes := 0
		for topic := range ts.count {
			bytes += len(topic) + perTopic
		}
		if bytes != ts.bytes {
			t.Fatalf("counts %d bytes, has %d", ts.bytes, bytes)
		}
	})
}
