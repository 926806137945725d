package dynamoselect

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"

	"github.com/kvatlas/kvatlas/internal/base/strictjson"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// rankTexts is an object with a text for every rank. As in serde_json's map with numeric keys, a key without a JSON
// number is a syntax error ([errRankKey]). A number outside the range of ranks is an invalid type. The last value of a
// duplicate key counts.
type rankTexts map[events.Rank]string

var errRankKey = errors.New("a key of an object by rank is no number")

func (r *rankTexts) UnmarshalJSON(data []byte) error {
	dec := json.NewDecoder(bytes.NewReader(data))
	if t, err := dec.Token(); err != nil || t != json.Delim('{') {
		return errors.New("the value is not an object")
	}
	out := rankTexts{}
	for dec.More() {
		begin := dec.InputOffset()
		if _, err := dec.Token(); err != nil {
			return err
		}
		raw := bytes.TrimLeft(data[begin:dec.InputOffset()], ", \t\r\n")
		rank, err := rankOf(raw[1 : len(raw)-1]) // without the quotes; a number contains no escape
		if err != nil {
			return err
		}
		var value json.RawMessage
		if err := dec.Decode(&value); err != nil {
			return err
		}
		var text string
		if string(value) == "null" {
			return fmt.Errorf("the text of rank %d is null", rank)
		}
		if err := strictjson.Unmarshal(value, &text); err != nil {
			return err
		}
		out[rank] = text
	}
	*r = out
	return nil
}

func rankOf(key []byte) (events.Rank, error) {
	digit := func(c byte) bool { return c >= '0' && c <= '9' }
	if len(key) == 0 || !digit(key[len(key)-1]) || !digit(key[0]) && key[0] != '-' || !json.Valid(key) {
		return 0, fmt.Errorf("%w: %.40q", errRankKey, key)
	}
	if _, err := strconv.ParseFloat(string(key), 64); err != nil {
		return 0, fmt.Errorf("%w: %.40q is out of range", errRankKey, key)
	}
	rank, err := strconv.ParseUint(string(key), 10, 32)
	return events.Rank(rank), err
}
