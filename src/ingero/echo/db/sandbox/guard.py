"""Which statements are let in: one SELECT whose syntax tree holds only what is listed here.

Everything not listed is refused, so a new release of DuckDB adds refusals, not holes. Runs in the child, on the child's
own parser: text that breaks a parser breaks nothing else.

Source: ``json_serialize_sql`` of DuckDB 1.5 and 2.0, whose names these are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import duckdb

MAX_SQL_CHARS: Final = 16_384
_MAX_NODES: Final = 20_000

_NODES: Final = frozenset({"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"})
_TABLE_REFS: Final = frozenset({
    "BASE_TABLE", "SUBQUERY", "JOIN", "EMPTY", "EXPRESSION_LIST", "TABLE_FUNCTION", "EMPTY_FROM",
})  # fmt: skip
_MODIFIERS: Final = frozenset({
    "ORDER_MODIFIER", "LIMIT_MODIFIER", "DISTINCT_MODIFIER", "LIMIT_PERCENT_MODIFIER",
    "ORDER_DEFAULT", "ASCENDING", "DESCENDING",
})  # fmt: skip
_CLASSES: Final = frozenset({
    "COLUMN_REF", "CONSTANT", "FUNCTION", "COMPARISON", "CONJUNCTION", "OPERATOR", "CASE", "CAST", "SUBQUERY",
    "BETWEEN", "WINDOW", "STAR", "LAMBDA", "COLLATE", "POSITIONAL_REFERENCE", "TYPE",
})  # fmt: skip
_PART_NAMES: Final = """
aggregate_handling alias aliases arg_orders arguments case_checks cast_type catalog catalog_name child child_type
child_types children class collation column column_name_alias column_names columns comparison_type condition cte_map
cte_name default_expr distinct distinct_on_targets else_expr end end_expr
exclude_clause exclude_list expr expression filter
filter_expr first from_table function function_name group_expressions group_sets has_ignore_nulls having id
ignore_nulls index input is_implicit is_null is_operator join_type key key_targets kind left lhs limit limit_type
literal lower map materialized modifiers name named_param_map nearest_count nearest_order_type node
null_order offset offset_expr order_bys orders partitions path qualified_exclude_list
qualified_name qualify query query_location query_location_length query_node ref_type
relation_name rename_list replace_list right scale schema schema_name second select_list setop_all setop_type size
start start_expr subquery subquery_type syntax_type table table_name text then_expr try_cast type type_expr
type_info type_name union_all upper user_type_modifiers using_columns value values when_expr where_clause width
with_ordinality
"""
_PARTS: Final = frozenset(_PART_NAMES.split())
"""Every member that an object of the tree may have with a value in it; others may be there, empty."""
_REFUSED_PARTS: Final = {
    "sample": "sampling (TABLESAMPLE, USING SAMPLE) is not let in; it needs random numbers: filter on hash(…) % n",
    "at_clause": "AT is not let in",
}
_TYPE_NAMES: Final = """
bigint bit blob bool boolean bpchar bytea char date datetime dec decimal double float float4 float8 hugeint int int1
int128 int16
int2 int32 int4 int64 int8 integer integral interval json list array logical long map nchar null numeric nvarchar oid
real row short
signed smallint string struct text time timestamp timestamp_ms timestamp_ns timestamp_s timestamp_us timestamptz
timetz tinyint
ubigint uhugeint uint128 uint16 uint32 uint64 uint8 uinteger union usmallint utinyint uuid varbinary varchar varint
bignum binary
"""
_TYPES: Final = frozenset(_TYPE_NAMES.split()) | {
    "timestamp with time zone",
    "time with time zone",
    "double precision",
    "character varying",
}
_TABLE_FUNCTIONS: Final = frozenset({"range", "generate_series", "unnest"})
_COUNTS: Final = frozenset({"count", "count_star"})
_RESERVED_CTE: Final = re.compile(r"(?i)duckdb_|pragma_|sqlite_|pg_|information_schema")

_FUNCTION_NAMES: Final = """
+ - * / // % ** ^ & | ~ << >> || @ ! ~~ !~~ ~~* !~~* ~~~ -> ->>
= <> < > <= >= in not and or between is_null
count count_star count_if countif sum sum_no_overflow fsum kahan_sum avg mean favg min max arg_min arg_max
argmin argmax min_by max_by arg_min_null arg_max_null any_value first last median mode mad quantile quantile_cont
quantile_disc
percentile_cont percentile_disc
approx_count_distinct approx_quantile stddev stddev_pop stddev_samp variance var_pop var_samp corr covar_pop
covar_samp regr_slope regr_intercept regr_r2 regr_count regr_avgx regr_avgy skewness kurtosis entropy bool_and bool_or
bit_and bit_or bit_xor product histogram list array_agg string_agg group_concat listagg geomean geometric_mean
row_number rank dense_rank rank_dense percent_rank cume_dist ntile lag lead first_value last_value nth_value fill
coalesce nullif ifnull if greatest least isnan isinf isfinite constant_or_null try
abs sign ceil ceiling floor round round_even roundbankers trunc sqrt cbrt exp ln log log2 log10 pow power mod fmod
divide multiply add subtract pi degrees radians sin cos tan asin acos atan atan2 sinh cosh tanh gcd lcm
bit_count xor even factorial gamma lgamma nextafter signbit
length len strlen char_length character_length lower lcase upper ucase trim ltrim rtrim substr substring left right
replace
contains starts_with prefix suffix ends_with instr strpos position split split_part str_split string_split
string_to_array regexp_matches regexp_full_match regexp_extract regexp_extract_all regexp_split_to_array
reverse concat concat_ws ascii chr unicode ord like_escape not_like_escape ilike_escape not_ilike_escape
bar hex to_hex md5 sha256 hash jaccard jaro_similarity
date_trunc datetrunc date_part datepart date_diff datediff date_sub datesub date_add time_bucket extract epoch
epoch_ms epoch_us
epoch_ns to_timestamp make_timestamp make_timestamp_ms make_timestamp_ns make_date make_time strftime strptime
try_strptime
year month day hour minute second millisecond microsecond quarter week weekofyear dayofweek dayofmonth dayofyear
isodow weekday yearweek last_day dayname monthname age to_seconds to_minutes to_hours to_days to_weeks to_months
to_years to_milliseconds to_microseconds now current_timestamp get_current_timestamp current_date today timezone
unnest range generate_series list_value list_pack array_value row struct_pack struct_extract list_extract list_element
array_extract
list_contains list_has array_contains list_position list_indexof list_slice array_slice list_sort list_reverse_sort
list_distinct
list_unique list_aggregate list_sum list_avg list_min list_max list_median list_count list_concat list_append
list_prepend list_filter list_transform list_apply list_reduce list_zip flatten array_length list_any_value
map map_keys map_values map_extract element_at cardinality map_entries map_from_entries
json_extract json_extract_string json_extract_path json_extract_path_text json_keys json_type json_valid
"""
FUNCTIONS: Final = frozenset(_FUNCTION_NAMES.split())
"""Lower case. Nothing that reads outside its arguments, and nothing whose output outgrows them without bound."""


class QueryRefusedError(Exception):
    """The statement is not let in.

    Args:
        message: Why, for the person who wrote it.
        code: The same in one word.
    """

    def __init__(self, message: str, code: str = "sql_not_allowed") -> None:
        super().__init__(message)
        self.message = message
        self.code = code


@dataclass(frozen=True, slots=True)
class QueryNeeds:
    """What a statement reads.

    Attributes:
        tables: By name.
        columns: Of all of them together, lower case, with names that are no columns among them; None is every column.
    """

    tables: frozenset[str]
    columns: frozenset[str] | None


def check_statement(
    connection: duckdb.DuckDBPyConnection, sql: str, tables: frozenset[str]
) -> QueryNeeds:
    """Hold a statement to the lists.

    Args:
        connection: Any instance; only its parser is used.
        sql: The statement.
        tables: Tables that may be named.

    Returns:
        The tables and columns that it names.

    Raises:
        RefusedError: It is not let in.
    """
    if len(sql) > MAX_SQL_CHARS:
        raise QueryRefusedError(f"longer than {MAX_SQL_CHARS} characters", "sql_too_long")
    if "\x00" in sql:
        raise QueryRefusedError("holds a null character")
    rows = connection.execute("SELECT json_serialize_sql(?::VARCHAR)", [sql]).fetchall()
    tree = json.loads(rows[0][0])
    if tree.get("error"):
        message = str(tree.get("error_message", "not a statement"))
        if tree.get("error_type") == "not implemented":
            raise QueryRefusedError("only SELECT is let in", "sql_not_read_only")
        raise QueryRefusedError(message.partition("\n")[0], "sql_syntax")
    statements = tree["statements"]
    if len(statements) != 1:
        raise QueryRefusedError("one statement at a time", "sql_not_read_only")
    ctes = {name.lower() for name in _iter_ctes(statements[0])}
    for name in ctes:
        if name in tables or _RESERVED_CTE.match(name):
            raise QueryRefusedError(f"WITH may not redefine {name[:64]!r}")
    named: set[str] = set()
    for depth, node in enumerate(_iter_dicts(statements[0])):
        if depth > _MAX_NODES:
            raise QueryRefusedError("too complex", "sql_too_long")
        _check_parts(node)
        _check_node(node, tables, ctes, named)
    return QueryNeeds(frozenset(named), _find_columns(statements[0]))


def _needs_every_column(node: dict[str, Any], counted: set[int]) -> bool:
    """``*`` outside ``count(*)``, ``COLUMNS(…)``, ``#1``, ``t(a, b)``, NATURAL JOIN."""
    if node.get("class") == "STAR":
        return id(node) not in counted or bool(node.get("expr") or node.get("columns"))
    return (
        node.get("class") == "POSITIONAL_REFERENCE"
        or bool(node.get("column_name_alias"))
        or node.get("ref_type") == "NATURAL"
    )


def _find_columns(root: object) -> frozenset[str] | None:
    """Names that may be columns; None where the statement's meaning rests on columns that it does not name."""
    names: set[str] = set()
    whole_rows: set[str] = set()
    counted: set[int] = set()
    rows_of: set[str] = set()
    for node in _iter_dicts(root):
        kind, expression_class = node.get("type"), node.get("class")
        if expression_class == "COLUMN_REF":
            path = [str(name).lower() for name in node.get("column_names", ())]
            names.update(path)
            whole_rows.update(path if len(path) == 1 else ())
        elif expression_class == "FUNCTION" and node.get("function_name") in _COUNTS:
            counted.update(id(child) for child in node.get("children", ()))
        elif _needs_every_column(node, counted):
            return None
        elif kind == "JOIN":
            names.update(str(name).lower() for name in node.get("using_columns", ()))
        if kind == "BASE_TABLE":
            rows_of |= {str(node.get(key, "")).lower() for key in ("alias", "table_name")}
    return None if rows_of & whole_rows else frozenset(names)


def _iter_dicts(root: object) -> Iterator[dict[str, Any]]:
    pending: list[object] = [root]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            yield value
            pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(value)


def _iter_ctes(root: object) -> Iterator[str]:
    for node in _iter_dicts(root):
        cte_map = node.get("cte_map")
        if isinstance(cte_map, dict):
            for entry in cte_map.get("map", ()):
                yield str(entry.get("key", ""))
        if node.get("type") in ("RECURSIVE_CTE_NODE", "CTE_NODE"):  # not a set: it may be an object
            yield str(node.get("cte_name", ""))


def _check_node(
    node: dict[str, Any], tables: frozenset[str], ctes: set[str], named: set[str]
) -> None:
    kind, expression_class = node.get("type"), node.get("class")
    if expression_class is not None:
        if expression_class not in _CLASSES:
            raise QueryRefusedError(f"{str(expression_class).lower()} expressions are not let in")
        if expression_class == "TYPE":
            _check_type(node)
    elif isinstance(kind, str):
        _check_kind(kind)
    if "function_name" in node:
        _check_function(node)
    if kind == "BASE_TABLE" and expression_class is None:
        _check_table(node, tables, ctes, named)
    if kind == "TABLE_FUNCTION" and expression_class is None:
        function = node.get("function") or {}
        if str(function.get("function_name", "")).lower() not in _TABLE_FUNCTIONS:
            raise QueryRefusedError("that table function is not let in")


def _check_kind(kind: str) -> None:
    if kind.endswith(("_QUERY_NODE", "_STATEMENT")):
        raise QueryRefusedError("only SELECT is let in", "sql_not_read_only")
    if kind not in _NODES | _TABLE_REFS | _MODIFIERS and not kind.endswith("_TYPE_INFO"):
        raise QueryRefusedError(f"{kind.lower().replace('_', ' ')} is not let in")


def _check_parts(node: dict[str, Any]) -> None:
    for name, value in node.items():
        if name in _PARTS or value is None or value in ("", [], {}, False):
            continue
        raise QueryRefusedError(
            _REFUSED_PARTS.get(name, f"{name.replace('_', ' ')[:64]} is not let in")
        )


def _check_type(node: dict[str, Any]) -> None:
    name = str(node.get("type_name", ""))
    path = (node.get("qualified_name") or {}).get("path", [name])
    if node.get("schema") or node.get("catalog") or len(path) > 1:
        raise QueryRefusedError("types are called by their plain name")
    if name.lower() not in _TYPES:
        raise QueryRefusedError(f"type {name[:64]!r} is not let in")


def _check_function(node: dict[str, Any]) -> None:
    name = str(node["function_name"]).lower()
    path = (node.get("qualified_name") or {}).get("path", [name])
    if node.get("schema") or node.get("catalog") or len(path) > 1:
        raise QueryRefusedError("functions are called by their plain name")
    if name not in FUNCTIONS:
        raise QueryRefusedError(f"function {name[:64]!r} is not let in", "sql_function_not_allowed")


def _check_table(
    node: dict[str, Any], tables: frozenset[str], ctes: set[str], named: set[str]
) -> None:
    name = str(node.get("table_name", "")).lower()
    path = (node.get("qualified_name") or {}).get("path", [name])
    if node.get("schema_name") or node.get("catalog_name") or len(path) > 1:
        raise QueryRefusedError("tables are called by their plain name")
    if name in tables:
        named.add(name)
    elif name not in ctes:
        raise QueryRefusedError(f"no table {name[:64]!r}; there are {', '.join(sorted(tables))}")
