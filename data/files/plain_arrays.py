"""Arrow's list views, text views and dictionaries as the lists and texts that the Hugging Face library knows."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

_TEXTS = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}
_BYTES = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}
_LISTS = (
    (pa.types.is_list, pa.list_),
    (pa.types.is_large_list, pa.large_list),
    (pa.types.is_list_view, pa.list_view),
    (pa.types.is_large_list_view, pa.large_list_view),
)


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type without views and dictionaries, also inside."""
    if kind in _TEXTS:
        return _TEXTS[kind]
    if pa.types.is_dictionary(kind):
        return plain_type(kind.value_type)
    if pa.types.is_list_view(kind) or pa.types.is_list(kind):
        return pa.list_(plain_type(kind.value_type))
    if pa.types.is_large_list_view(kind) or pa.types.is_large_list(kind):
        return pa.large_list(plain_type(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, plain_type(field.type)) for field in kind])
    return kind


def bytes_type(kind: pa.DataType) -> pa.DataType:
    """The type with bytes for texts, also inside: values of the one can be looked at as values of the other."""
    if kind in _BYTES:
        return _BYTES[kind]
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, bytes_type(kind.value_type), kind.ordered)
    for is_of_kind, make in _LISTS:
        if is_of_kind(kind):
            return make(bytes_type(kind.value_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(bytes_type(kind.value_type), kind.list_size)
    if pa.types.is_map(kind):
        return pa.map_(bytes_type(kind.key_type), bytes_type(kind.item_type), kind.keys_sorted)
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, bytes_type(field.type)) for field in kind])
    return kind


def plain_column(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The same values as `plain_type` of the column's type."""
    kind = plain_type(column.type)
    return column if kind == column.type else pa.chunked_array([_plain(part) for part in column.chunks], type=kind)


def _plain(array: pa.Array) -> pa.Array:
    kind = plain_type(array.type)
    if kind == array.type:
        return array
    if pa.types.is_dictionary(array.type):
        return _plain(array.dictionary_decode())
    if pa.types.is_struct(kind):
        parts = [_plain(part) for part in array.flatten()]
        return pa.StructArray.from_arrays(parts, fields=list(kind), mask=array.is_null())
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        # Arrow 26 casts a list view to a list whose last offset is missing.
        lengths = pc.fill_null(pc.list_value_length(array), 0).cast(pa.int64())
        ends = pc.cumulative_sum(lengths)
        offsets = pa.concat_arrays([pa.array([0], pa.int64()), ends])
        lists, width = (pa.ListArray, pa.int32()) if pa.types.is_list(kind) else (pa.LargeListArray, pa.int64())
        return lists.from_arrays(offsets.cast(width), _plain(array.flatten()), type=kind, mask=array.is_null())
    return array.cast(kind)
