package events

import (
	"encoding/json"
	"errors"
	"fmt"

	"github.com/kvatlas/kvatlas/internal/base/strictjson"
)

// ReadWorkerEvents reads the events of one worker in JSON (ai-dynamo/dynamo › lib/kv-router, protocols). Three
// forms are valid:
//
//	{"event_id":1,"data":{…},"dp_rank":0}   KvCacheEvent
//	{"events":[…],"shutdown":false}         KvCacheEvents
//	{"worker_id":…,"event":{…}}             a router event; worker replaces its worker_id
//
// If worker is empty, only router events are accepted, as in [ReadRouterEvent]. yield receives every event with the
// event's JSON, in order. After an error, the remaining events are not read. shutdown is true if the worker will
// publish no further events.
func ReadWorkerEvents(
	line []byte, worker WorkerID, yield func(e RouterEvent, text []byte) error,
) (shutdown bool, err error) {
	if worker == "" {
		e, err := ReadRouterEvent(line)
		if err == nil {
			err = yield(e, line)
		}
		return false, err
	}
	var form struct {
		Worker   json.RawMessage   `json:"worker_id"`
		Event    json.RawMessage   `json:"event"`
		Events   []json.RawMessage `json:"events"`
		Shutdown bool              `json:"shutdown"`
		ID       json.RawMessage   `json:"event_id"`
	}
	if err := strictjson.Unmarshal(line, &form); err != nil {
		return false, err
	}
	list := form.Events
	switch named, bare := form.Event != nil, form.ID != nil; {
	case named && !bare && list == nil:
		e, err := ReadRouterEvent(line)
		if err != nil {
			return false, err
		}
		e.Key.Instance = worker
		return false, yield(e, line)
	case bare && !named && list == nil:
		list = []json.RawMessage{line}
	case list == nil || bare || named:
		return false, errors.New("exactly one of event_id with data, events, and event is required")
	}
	head := append(appendJSONString([]byte(`{"worker_id":`), string(worker)), `,"event":`...)
	for i, text := range list {
		framed := append(append(append([]byte(nil), head...), text...), '}')
		e, err := ReadRouterEvent(framed)
		if err == nil {
			e.Key.Instance = worker // also if it is not UTF-8
			err = yield(e, text)
		}
		if err != nil {
			return false, fmt.Errorf("event %d of %d: %w", i, len(list), err)
		}
	}
	return form.Shutdown, nil
}
