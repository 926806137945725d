package events

import (
	"math"
	"strconv"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
)

// LoRAByID returns the name for hashing the blocks of an adapter with a number in events and no name: vLLM before
// 0.14, and TensorRT-LLM. Queries pass the name as lora_name. No real adapter has such a name.
func LoRAByID(id string) string { return loraByID + id }

const loraByID = "lora_id:"

func (d *Decoder) readLoRAID(r *msgp.Reader) {
	e := &d.raw
	if id, ok := r.Uint(math.MaxUint64); ok {
		// In maps nil means "no adapter", and 0 is the first adapter of TensorRT-LLM.
		if e.loraID = nil; id > 0 || e.isMap {
			e.loraID = strconv.AppendUint(d.digits[:0], id, 10)
		}
	} else if id, ok := r.Str(); ok {
		e.loraID = id
	} else if !r.Null() {
		e.badLoRAID = true
		r.Skip()
	}
}
