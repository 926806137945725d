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

// rankTexts is an object with a text for each rank. It is read as serde_json reads a map with numbers as keys: a key
// that is no number in JSON's own spelling is a fault of syntax ([errRankKey]), and a number that is no rank a value of
// the wrong type. Of a key that is there twice the last value counts.
type rankTexts map[events.Rank]string

var errRankKey = errors.New("a key of an object by rank is no number")

func (r *rankTexts) UnmarshalJSON(data []byte) error {
	dec := json.NewDecoder(bytes.NewReader(data))
	if t, err := dec.Token(); err != nil || t != json.Delim('{') {
		return errors.New("it is no object")
	}
	out := rankTexts{}
	for dec.More() {
		begin := dec.InputOffset()
		if _, err := dec.Token(); err != nil {
			return err
		}
		raw := bytes.TrimLeft(data[begin:dec.InputOffset()], ", \t\r\n")
		rank, err := rankOf(raw[1 : len(raw)-1]) // without its quotes; escapes are no spelling of a number
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
